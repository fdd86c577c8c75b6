"""What a user gives on the command line: counts, attributes, and tensors in an ``.npz`` archive."""

from __future__ import annotations

import argparse
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from nxrt_cuda.cli.errors import InputError
from nxrt_cuda.cli.operators import Operator
from nxrt_cuda.dtype import data_type
from nxrt_cuda.errors import TensorError

__all__ = ["check_writable", "count_from", "parse_attributes", "read_inputs", "split_names", "write_outputs"]

_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    RuntimeError,  # encrypted, or compressed by an unknown method
    MemoryError,  # a header that claims an absurd shape
)

_BFLOAT16_BITS = (np.dtype(np.uint16), np.dtype("V2"))
"""``np.save`` writes the bfloat16 of ml_dtypes as plain 2-byte elements, the second of these."""


def count_from(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parse


def parse_attributes(texts: Sequence[str]) -> dict[str, int | float | str]:
    """``NAME=VALUE`` texts as attributes: an int where the value is one, else a float, else the text.

    Raises:
        InputError: a text has no ``=``, or a name is given twice.
    """
    attributes: dict[str, int | float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise InputError(f"--attr {text!r} is not of the form NAME=VALUE")
        if name in attributes:
            raise InputError(f"--attr {name} is given twice")
        attributes[name] = _parse_value(value)
    return attributes


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def split_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The names in comma-separated lists."""
    return tuple(name for text in texts for name in text.split(",") if name)


def read_inputs(
    path: Path, operator: Operator, *, bfloat16: Sequence[str] = (), ignored: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """The operator's inputs from an archive, by name.

    Args:
        path: an ``.npz`` archive.
        operator: whose inputs.
        bfloat16: names of arrays that hold bfloat16 as bits.
        ignored: names of arrays that are no inputs.

    Raises:
        InputError: the file cannot be read; an array is missing, or not an input's and not ``ignored``,
            or of another form than its name asks for.
    """
    arrays = _read_archive(path, ignored)
    known = ", ".join(operator.inputs)
    for name in arrays:
        if name not in operator.inputs:
            raise InputError(
                f"{path}: {name!r} is no input of {operator.op_type}, whose inputs are {known}; "
                f"to leave it out, add --ignore {name}"
            )
    for name in operator.inputs[: operator.required]:
        if name not in arrays:
            raise InputError(f"{path}: the required input {name!r} is missing; it holds {_listed(arrays)}")
    for name in bfloat16:
        if name not in arrays:
            raise InputError(f"--bfloat16 {name}: {path} has no such array; it holds {_listed(arrays)}")
    for name, array in arrays.items():
        try:
            arrays[name] = _as_bfloat16(array) if name in bfloat16 else _as_tensor(array)
        except TensorError as error:
            hint = f"; if it holds bfloat16, add --bfloat16 {name}" if array.dtype in _BFLOAT16_BITS else ""
            raise InputError(f"{path}: {name!r}: {error}{hint}") from None
    return arrays


def _as_bfloat16(array: np.ndarray) -> np.ndarray:
    if array.dtype not in _BFLOAT16_BITS:
        raise TensorError(f"dtype {array.dtype} does not hold bfloat16, which is given as uint16 bits")
    return array.view(ml_dtypes.bfloat16)


def _as_tensor(array: np.ndarray) -> np.ndarray:
    data_type(array.dtype)
    return array


def _read_archive(path: Path, ignored: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                single = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
                what = "one array without a name" if single else "no .npz archive, or a part of one"
                raise InputError(f"{path} holds {what}; np.savez makes an archive of named arrays")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                for name in ignored:
                    if name not in archive:
                        raise InputError(f"--ignore {name}: {path} has no such array; it holds {_listed(archive)}")
                return {name: _read_array(path, archive, name) for name in archive if name not in ignored}
    except _UNREADABLE as error:
        raise InputError(f"{path} cannot be read: {_reason(error)}") from None


def _read_array(path: Path, archive: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        array = archive[name]
    except _UNREADABLE as error:
        raise InputError(f"{path}: {name!r} cannot be read: {_reason(error)}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: {name!r} is not an array")
    return array


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "no arrays"


def check_writable(option: str, path: Path) -> None:
    """Refuse, before the work, a place where its results could not be written afterwards.

    Raises:
        InputError: it names ``option``.
    """
    directory = path.parent
    if not directory.is_dir():
        raise InputError(f"{option} {path}: {directory} is no directory")
    if path.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise InputError(f"{option} {path} cannot be written")


def write_outputs(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz`` archive; bfloat16 as uint16 bits, as :func:`read_inputs` takes it.

    Raises:
        InputError: the file cannot be written.
    """
    plain = {
        name: array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array for name, array in outputs.items()
    }
    try:
        with path.open("wb") as file:
            np.savez(file, **plain)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{path} cannot be written: {_reason(error)}") from None
