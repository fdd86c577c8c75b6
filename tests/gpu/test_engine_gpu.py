"""Engines on a GPU: what the host driver's tests establish, once more on real streams and graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.testing import count
from tests.engine.operators import combine, evaluate, random_nodes, registered_combine
from tests.engine.test_engine import Eager, layer_engine, layer_inputs
from tests.engine.test_engine_buckets import attention_engine, attention_inputs
from tests.test_examples import EXAMPLES, output_of


@pytest.fixture(autouse=True)
def _combine_is_registered() -> Iterator[None]:
    with registered_combine():
        yield


def test_a_hundred_runs_of_changing_contents_equal_eager(rt: nx.CudaRuntime) -> None:
    """Byte for byte, from one capture; a steady run launches, allocates and compiles nothing, and waits for nothing."""
    rng = np.random.default_rng(1)
    engine, eager = layer_engine(rt), Eager(rt)
    engine.run(layer_inputs(rng))
    for _ in range(100):
        arrays = layer_inputs(rng)
        expected = eager(arrays)
        with count(rt) as seen:
            outputs = engine.run(arrays)
        assert (seen.launches, seen.allocations, seen.compiles, seen.replays) == (0, 0, 0, 1)
        assert seen.stats.synchronizations == 0
        for name, output in outputs.items():
            np.testing.assert_array_equal(output.numpy(), expected[name], err_msg=name)
    assert engine.report().captures == 1
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE


def test_runs_that_are_not_awaited_do_not_mix(rt: nx.CudaRuntime) -> None:
    """Inputs of the next run are queued behind the replay that reads the present ones."""
    shape = (1 << 18,)
    nodes = [combine(["x"], "a"), combine(["a"], "b", decline="no"), combine(["b", "a"], "y")]
    engine = nx.Engine(rt, nodes, {"x": (nx.float32, shape)}, ["y"])
    sources = [rt.from_array(np.full(shape, 8 * factor, np.float32)) for factor in range(8)]
    results = [engine.run({"x": sources[turn % 8]}, copy_outputs=True)["y"] for turn in range(64)]
    for turn, result in enumerate(results):
        np.testing.assert_array_equal(result.numpy(), np.full(shape, 5 * (turn % 8), np.float32))


@pytest.mark.parametrize("declined", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_compute_what_numpy_computes(rt: nx.CudaRuntime, seed: int, declined: float) -> None:
    """With buffers that share memory, and kernels between the segments."""
    rng = np.random.default_rng(seed)
    nodes, unread = random_nodes(rng, 25, declined=declined)
    shape = (3, 5000)
    engine = nx.Engine(rt, nodes, {"x": (nx.float32, shape), "y": (nx.float32, shape)}, unread)
    for _ in range(3):
        values = {name: rng.standard_normal(shape, np.float32) for name in "xy"}
        expected = evaluate(nodes, values)
        for name, output in engine.run(values).items():
            np.testing.assert_array_equal(output.numpy(), expected[name], err_msg=name)
    (bucket,) = engine.report().buckets
    assert bucket.buffer_nbytes < bucket.buffer_nbytes_without_reuse


def test_a_padded_batch_gives_what_an_exact_one_gives(rt: nx.CudaRuntime) -> None:
    """The selection exactly; attention within rounding, since the batch may decide how its sums are split."""
    rng = np.random.default_rng(0)
    padded, exact = attention_engine(rt, bucket_sizes={"B": (1, 4, 8)}), attention_engine(rt)
    for batch in (3, 4, 8, 1, 2, 5, 7, 3):
        arrays = attention_inputs(rng, batch)
        if batch == 8:
            arrays["v"][:] = np.nan
        expected, outputs = exact.run(arrays), padded.run(arrays)
        np.testing.assert_array_equal(outputs["selected"].numpy(), expected["selected"].numpy())
        np.testing.assert_allclose(outputs["y"].numpy(), expected["y"].numpy(), atol=1e-5, rtol=1e-5)
    assert padded.report().captures == 3


def test_evictions_under_way_disturb_no_queued_run(rt: nx.CudaRuntime) -> None:
    """Buckets are given up while their last replay may still be running, and nothing leaks."""
    nodes = [combine(["x"], "half"), combine(["half", "half"], "y")]
    engine = nx.Engine(rt, nodes, {"x": (nx.float32, ("N",))}, ["y"], max_bytes=0)
    results = []
    for turn in range(40):
        size = 100_000 + turn % 4
        results.append(engine.run({"x": np.full(size, turn, np.float32)}, copy_outputs=True)["y"])
    for turn, result in enumerate(results):
        np.testing.assert_array_equal(result.numpy(), np.full(100_000 + turn % 4, 0.75 * turn, np.float32))
    assert engine.report().evictions == 39
    del results, result
    engine.close()
    rt.synchronize()
    rt.trim_pool()
    assert rt.stats().live_bytes <= 4096


def test_tensors_of_another_library_are_inputs_without_a_transfer(rt: nx.CudaRuntime) -> None:
    torch = pytest.importorskip("torch")
    engine = nx.Engine(rt, [combine(["x", "x"], "y")], {"x": (nx.float32, (1000,))}, ["y"])
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    engine.prepare()
    with count(rt) as seen:
        y = engine.run({"x": x})["y"]
    assert (seen.htod_copies, seen.stats.dtod_copies, seen.replays) == (0, 1, 1)
    np.testing.assert_array_equal(torch.from_dlpack(y).cpu().numpy(), 1.5 * np.arange(1000, dtype=np.float32))


def test_the_decode_loop_grows_in_one_graph(gpu: str) -> None:
    """On the GPU that the example finds by itself."""
    text = output_of(EXAMPLES / "decode_loop.py")
    assert text.startswith("cuda:0\n")
    assert "DIFFERS" not in text
    assert "96 steps: 0 captures, 96 replays, 0 launches, 0 compiles" in text
    assert re.search(r"^  captures +1$", text, re.MULTILINE)
