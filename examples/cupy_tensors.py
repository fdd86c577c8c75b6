"""Run a kernel on CuPy's arrays and CuPy's stream, without a copy in either direction.

A runtime opened on CuPy's current stream queues its work between CuPy's own. ``from_array`` takes a CuPy array
as it lies in memory, ``cupy.from_dlpack`` takes the result back. The scores here are whole numbers, exact in
float32, so CuPy's own sort has to give the same indices.

    python examples/cupy_tensors.py

Needs CuPy and a GPU; says so and succeeds where one is missing.
"""

from __future__ import annotations

import nxrt_cuda as nx

ROWS, KEYS, HEADS, HEAD_DIM, TOP_K = 16, 3000, 4, 64, 100


def main() -> None:
    try:
        import cupy as cp
    except ModuleNotFoundError:
        print("skipped: CuPy is not installed (pip install cupy-cuda13x)")
        return
    if not cp.is_available():
        print("skipped: CuPy finds no CUDA device; this example is about device arrays")
        return

    with cp.cuda.Stream(non_blocking=True) as stream, nx.open_runtime("cuda:0", stream=stream) as rt:
        random = cp.random.default_rng(3)
        query = random.integers(-3, 4, (1, ROWS, HEADS, HEAD_DIM)).astype(cp.float32)
        key = random.integers(-3, 4, (1, KEYS, HEAD_DIM)).astype(cp.float32)
        weights = random.integers(1, 4, (1, ROWS, HEADS)).astype(cp.float32)
        bias = cp.zeros((1, 1, ROWS, KEYS), cp.float32)

        inputs = [rt.from_array(array) for array in (query, key, weights, bias)]
        assert inputs[0].ptr == query.data.ptr
        output = rt.empty((1, 1, ROWS, TOP_K), nx.int64)

        attributes = {"top_k": TOP_K, "scale": 1.0}
        node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes)
        kernel = nx.create_kernel(rt, node, [tensor.shape for tensor in inputs])
        kernel.execute(inputs, [output])
        selected = cp.from_dlpack(output)

        dots = cp.maximum(cp.einsum("bshd,btd->bsht", query, key), 0)
        scores = cp.einsum("bsht,bsh->bst", dots, weights).astype(cp.int64)
        # Distinct sort keys: the higher score first, then the lower index.
        order = cp.argsort(cp.arange(KEYS) - scores * KEYS, axis=-1)
        expected = cp.sort(order[..., :TOP_K], axis=-1)
        same = bool((selected[:, 0] == expected).all())
        seen = rt.stats()
        print(f"{ROWS} rows, {TOP_K} of {KEYS} keys each: {'as CuPy sorts' if same else 'DIFFERS FROM CUPY'}")
        print(f"copies to the device {seen.htod_copies}, from it {seen.dtoh_copies}, on it {seen.dtod_copies}")


if __name__ == "__main__":
    main()
