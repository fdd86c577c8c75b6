"""Where operands lie: each one's address decides how wide accesses are, and an input reaches to its last element."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nxrt_cuda as nx

ATTENTION = nx.Node("Attention")
SELECT = nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 2, "scale": 1.0})


def load_width(
    rt: nx.CudaRuntime,
    monkeypatch: pytest.MonkeyPatch,
    node: nx.Node,
    shapes: dict[str, tuple[int, ...]],
    shifted: str | None,
) -> int:
    """Elements that the first kernel of a call loads at once, with one operand an element off its alignment."""
    seen: list[nx.KernelSpec] = []
    load = type(rt).function

    def function(spec: nx.KernelSpec) -> object:
        seen.append(spec)
        return load(rt, spec)

    def operand(name: str) -> nx.TensorMut:
        size, dtype = math.prod(shapes[name]), nx.int64 if name == "selected_indices" else nx.float32
        return rt.zeros((size + 4,), dtype).narrow(0, int(name == shifted), size).reshape(shapes[name])

    monkeypatch.setattr(rt, "function", function)
    *inputs, output = map(operand, shapes)
    nx.create_kernel(rt, node).execute(inputs, [output])
    return int(dict(seen[0].macros)["LOAD_WIDTH"])


@pytest.mark.parametrize(
    ("shifted", "width"), [(None, 4), ("query", 1), ("key", 1), ("value", 1), ("attn_mask", 4), ("output", 1)]
)
def test_attention_loads_as_the_least_aligned_operand_allows(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, shifted: str | None, width: int
) -> None:
    """But for the mask, which has a width of its own."""
    shapes = dict.fromkeys(("query", "key", "value"), (1, 2, 4, 8)) | {"attn_mask": (4, 4), "output": (1, 2, 4, 8)}
    assert load_width(rt, monkeypatch, ATTENTION, shapes, shifted) == width


@pytest.mark.parametrize(
    ("shifted", "width"), [(None, 4), ("query", 1), ("key", 1), ("weights", 4), ("bias", 4), ("selected_indices", 4)]
)
def test_selection_loads_as_query_and_key_allow(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, shifted: str | None, width: int
) -> None:
    """The others are read element by element."""
    shapes = {"query": (1, 2, 3, 8), "key": (1, 5, 8), "weights": (1, 2, 3), "bias": (1, 1, 2, 5)}
    shapes["selected_indices"] = (1, 1, 2, 2)
    assert load_width(rt, monkeypatch, SELECT, shapes, shifted) == width


def test_an_output_among_the_rows_of_a_strided_input_overlaps_it(rt: nx.CudaRuntime) -> None:
    """A view of a cache reaches to its last row, farther than the bytes it counts; what lies behind is free."""
    query = rt.from_array(np.ones((1, 2, 4, 8), np.float32))
    cache = rt.from_array(np.ones((2 * 16 * 8 + 64,), np.float32))
    key = cache.narrow(0, 0, 2 * 16 * 8).reshape((1, 2, 16, 8)).narrow(2, 0, 4)
    value = rt.from_array(np.ones((1, 2, 16, 8), np.float32)).narrow(2, 0, 4)
    kernel = nx.create_kernel(rt, ATTENTION)
    end = (16 + 4) * 8
    for first in (0, 16 * 8, end - 1):
        output = cache.narrow(0, first, 64).reshape((1, 2, 4, 8))
        with pytest.raises(nx.KernelError, match=r"output 0 \('output'\) overlaps input 1 \('key'\)"):
            kernel.execute([query, key, value], [output])
    output = cache.narrow(0, end, 64).reshape((1, 2, 4, 8))
    kernel.execute([query, key, value], [output])
    np.testing.assert_allclose(output.numpy(), 1, rtol=1e-6)
