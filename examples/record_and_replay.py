"""Record DsaIndexSelect into a graph, and replay it while the contents of its inputs change.

A decoder asks which keys its next token should attend to. Shapes, addresses and launches stay the same from
step to step; only the query and the number of visible keys differ. So both launches are recorded once, and a
step is: overwrite the inputs in place, replay, read the output. No replay allocates, compiles or launches
through the kernel object, and each one selects exactly what an eager run selects.

    python examples/record_and_replay.py
"""

from __future__ import annotations

import numpy as np

import nxrt_cuda as nx

KEYS, HEADS, HEAD_DIM, TOP_K = 64, 4, 32, 8


def main() -> None:
    rng = np.random.default_rng(7)
    rt = nx.open_runtime()
    query = rt.from_array(rng.standard_normal((1, 1, HEADS, HEAD_DIM), np.float32))
    key = rt.from_array(rng.standard_normal((1, KEYS, HEAD_DIM), np.float32))
    weights = rt.from_array(rng.random((1, 1, HEADS), np.float32))
    bias = rt.from_array(np.zeros((1, 1, 1, KEYS), np.float32))
    selected = rt.empty((1, 1, 1, TOP_K), nx.int64)
    inputs = [query, key, weights, bias]

    attributes = {"top_k": TOP_K, "scale": HEAD_DIM**-0.5}
    node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes)
    kernel = nx.create_kernel(rt, node, [tensor.shape for tensor in inputs])
    print(f"{rt.device}, before the first execution: {kernel.capture_support()}")
    kernel.execute(inputs, [selected])  # compiles, and sizes the workspace
    print(f"{rt.device}, after it: {kernel.capture_support()}\n")

    with rt.capture([kernel]) as graph:
        kernel.execute(inputs, [selected])
    recorded = rt.stats()

    steps = []
    for visible in (3, 20, 64, 0):
        query.copy_from(rng.standard_normal(query.shape, np.float32))
        bias.copy_from(np.where(np.arange(KEYS) < visible, 0, -np.inf).astype(np.float32).reshape(bias.shape))
        graph.replay()
        steps.append((visible, query.numpy(), bias.numpy(), selected.numpy().ravel()))
    replayed = rt.stats().since(recorded)

    print("keys visible   selected")
    for visible, query_then, bias_then, replay in steps:
        query.copy_from(query_then)
        bias.copy_from(bias_then)
        kernel.execute(inputs, [selected])
        same = np.array_equal(replay, selected.numpy().ravel())
        print(f"{visible:12}   {' '.join(f'{i:2}' for i in replay)}   {'as eager' if same else 'DIFFERS FROM EAGER'}")
    print(
        f"\n{replayed.graph_replays} replays: {replayed.launches} launches, "
        f"{replayed.driver_allocations} allocations, {replayed.modules_compiled} compiles"
    )


if __name__ == "__main__":
    main()
