"""Each combination of symbol sizes has a plan, a graph and memory of its own; batches may be padded to a few sizes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.testing import count
from tests.engine.operators import combine

F32 = nx.float32


def exact_engine(rt: nx.CudaRuntime, **options: Any) -> nx.Engine:
    """``y = 0.75 * x`` of [B, T] numbers, through an intermediate."""
    nodes = [combine(["x"], "half"), combine(["half", "half"], "y")]
    return nx.Engine(rt, nodes, {"x": (F32, ("B", "T"))}, ["y"], **options)


def check(engine: nx.Engine, *shape: int) -> nx.TensorMut:
    x = np.random.default_rng(shape[0]).standard_normal(shape, np.float32)
    y = engine.run({"x": x})["y"]
    np.testing.assert_array_equal(y.numpy(), 0.75 * x)
    return y


def names(engine: nx.Engine) -> list[str]:
    return [bucket.name for bucket in engine.report().buckets]


def test_every_combination_of_sizes_is_captured_once(rt: nx.CudaRuntime) -> None:
    engine = exact_engine(rt)
    for _ in range(3):
        for shape in ((1, 5), (5, 1), (2, 5)):
            check(engine, *shape)
    report = engine.report()
    assert (report.captures, report.replays, report.evictions) == (3, 9, 0)
    assert names(engine) == ["engine [B=1, T=5]", "engine [B=5, T=1]", "engine [B=2, T=5]"]
    assert [bucket.runs for bucket in report.buckets] == [3, 3, 3]


def test_prepare_builds_the_bucket_that_a_call_will_use(rt: nx.CudaRuntime) -> None:
    engine = exact_engine(rt)
    engine.prepare({"T": 5, "B": 2})
    with count(rt) as seen:
        engine.run({"x": np.zeros((2, 5), np.float32)})
    assert (seen.launches, seen.allocations, seen.replays) == (0, 0, 1)
    with pytest.raises(nx.EngineError, match="sizes of 'B' given; the symbols are 'B', 'T'"):
        engine.prepare({"B": 2})


def test_the_least_recently_used_bucket_gives_way(rt: nx.CudaRuntime) -> None:
    """Memory stays within the bound, counted as the report counts it; the ones used last survive."""
    engine = exact_engine(rt, max_bytes=3 * 3 * 1024)
    for size in (1, 2, 3):
        check(engine, size, 256 // size)
    assert engine.report().nbytes == 3 * 3 * 1024
    check(engine, 1, 256)
    check(engine, 4, 64)
    assert names(engine) == ["engine [B=3, T=85]", "engine [B=1, T=256]", "engine [B=4, T=64]"]
    check(engine, 2, 128)
    report = engine.report()
    assert (report.evictions, report.captures) == (2, 5)
    assert report.nbytes <= 3 * 3 * 1024


def test_a_bucket_beyond_the_bound_runs_alone(rt: nx.CudaRuntime) -> None:
    """The one in use is never given up, and goes when the next comes."""
    engine = exact_engine(rt, max_bytes=10_000)
    check(engine, 1, 4)
    check(engine, 100, 100)
    assert names(engine) == ["engine [B=100, T=100]"]
    check(engine, 100, 100)
    check(engine, 1, 4)
    assert names(engine) == ["engine [B=1, T=4]"]
    assert engine.report().evictions == 2


def test_a_bound_of_zero_keeps_one_bucket(rt: nx.CudaRuntime) -> None:
    engine = exact_engine(rt, max_bytes=0)
    for size in (1, 2, 1):
        check(engine, size, 8)
    assert engine.report().evictions == 2


def test_workspaces_count_towards_the_bound(rt: nx.CudaRuntime) -> None:
    node = nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 4, "scale": 1.0})
    shapes = {"q": ("S", 1, 1), "k": (300, 1), "w": ("S", 1), "b": (1, "S", 300)}
    engine = nx.Engine(
        rt,
        [(node, list("qkwb"), ["y"])],
        {name: (F32, (1, *shape)) for name, shape in shapes.items()},
        ["y"],
        max_bytes=1 << 20,
    )
    engine.prepare({"S": 8})
    (bucket,) = engine.report().buckets
    assert bucket.workspace_nbytes >= 8 * 300 * 5
    engine.prepare({"S": 400})
    assert names(engine) == ["engine [S=400]"]
    assert engine.report().nbytes > 400 * 300 * 9


def test_an_evicted_output_stays_readable_and_its_memory_returns_after_it(rt: nx.CudaRuntime) -> None:
    engine = exact_engine(rt, max_bytes=0)
    y = check(engine, 2, 8)
    live = rt.stats().live_bytes
    expected = y.numpy()
    check(engine, 3, 8)
    np.testing.assert_array_equal(y.numpy(), expected)
    del y
    gc.collect()
    rt.synchronize()
    rt.trim_pool()
    assert rt.stats().live_bytes <= live


def test_many_evictions_leak_nothing(rt: nx.CudaRuntime) -> None:
    """After each turn of the same buckets, the driver has the same objects open."""
    engine = exact_engine(rt, max_bytes=4096)
    seen = []
    for turn in range(60):
        check(engine, 1 + turn % 3, 8 + turn % 5)
        if turn % 15 == 14:
            gc.collect()
            rt.synchronize()
            rt.trim_pool()
            seen.append((str(rt._driver.live()), rt.stats().live_bytes))
    assert len(set(seen)) == 1, seen
    assert engine.report().evictions >= 50


# Padding.


def attention_engine(rt: nx.CudaRuntime, **options: Any) -> nx.Engine:
    """Two attentions with a mask and lengths, and a key selection, all of one batch."""
    return nx.Engine(
        rt,
        [
            (nx.Node("Attention"), ["q", "k", "v", "mask", "lengths"], ["context"]),
            (nx.Node("Attention"), ["context", "k", "v"], ["y"]),
            (
                nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 3, "scale": 1.0}),
                ["iq", "ik", "iw", "bias"],
                ["selected"],
            ),
        ],
        {
            "q": (F32, ("B", 2, 3, 8)),
            "k": (F32, ("B", 2, 5, 8)),
            "v": (F32, ("B", 2, 5, 8)),
            "mask": (F32, ("B", 1, 3, 5)),
            "lengths": (nx.int32, ("B",)),
            "iq": (F32, ("B", 1, 2, 4)),
            "ik": (F32, ("B", 5, 4)),
            "iw": (F32, ("B", 1, 2)),
            "bias": (F32, ("B", 1, 1, 5)),
        },
        ["y", "selected"],
        **options,
    )


def attention_inputs(rng: np.random.Generator, batch: int) -> dict[str, np.ndarray]:
    shapes = {
        "q": (2, 3, 8),
        "k": (2, 5, 8),
        "v": (2, 5, 8),
        "mask": (1, 3, 5),
        "iq": (1, 2, 4),
        "ik": (5, 4),
        "iw": (1, 2),
        "bias": (1, 1, 5),
    }
    arrays = {name: rng.standard_normal((batch, *shape), np.float32) for name, shape in shapes.items()}
    return arrays | {"lengths": rng.integers(0, 6, batch).astype(np.int32)}


def test_a_padded_batch_gives_what_an_exact_one_gives(rt: nx.CudaRuntime) -> None:
    """Byte for byte, from as many graphs as there are bucket sizes in use, whatever was in the rows before."""
    rng = np.random.default_rng(0)
    padded, exact = attention_engine(rt, bucket_sizes={"B": (1, 4, 8)}), attention_engine(rt)
    for batch in (3, 4, 8, 1, 2, 5, 7, 3, 0):
        arrays = attention_inputs(rng, batch)
        if batch == 8:
            arrays["v"][:] = np.nan
        expected, outputs = exact.run(arrays), padded.run(arrays)
        assert outputs["y"].shape == (batch, 2, 3, 8)
        for name, output in outputs.items():
            np.testing.assert_array_equal(output.numpy(), expected[name].numpy(), err_msg=f"{name}, B={batch}")
    assert padded.report().captures == 3
    assert sorted(names(padded)) == ["engine [B=1]", "engine [B=4]", "engine [B=8]"]


@pytest.mark.parametrize("batch", [2, 3])
def test_rows_of_an_earlier_larger_batch_are_zeros_again(rt: nx.CudaRuntime, batch: int) -> None:
    """A length out of range would be latched at every later run, though it is nobody's any more."""
    rng = np.random.default_rng(1)
    engine = attention_engine(rt, bucket_sizes={"B": (4,)})
    bad = attention_inputs(rng, 4)
    bad["lengths"][3] = 99
    engine.run(bad)
    assert rt.check_capture_error() is nx.CaptureErrorCode.TOTAL_LENGTH
    rt.reset_capture_error()
    engine.run(attention_inputs(rng, batch))
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE
    with count(rt) as seen:
        engine.run(attention_inputs(rng, 3))
        engine.run(attention_inputs(rng, 3))
    assert seen.stats.memsets == 0, "rows that are zeros are not filled again"


def test_a_steady_padded_run_allocates_nothing(rt: nx.CudaRuntime) -> None:
    rng = np.random.default_rng(2)
    engine = attention_engine(rt, bucket_sizes={"B": (4,)})
    first = engine.run(attention_inputs(rng, 3))
    with count(rt) as seen:
        again = engine.run(attention_inputs(rng, 3))
    assert (seen.launches, seen.allocations, seen.replays) == (0, 0, 1)
    assert all(first[name] is again[name] for name in first)


def test_bound_tensors_are_seen_up_to_the_bucket(rt: nx.CudaRuntime) -> None:
    """What lies behind the call's own rows may be anything."""
    rng = np.random.default_rng(4)
    cache = rng.standard_normal((4, 2, 5, 8), np.float32)
    cache[3] = np.nan
    shape = ("B", 2, 5, 8)
    engine = nx.Engine(
        rt,
        [(nx.Node("Attention"), ["q", "k", "v"], ["y"])],
        {"q": (F32, ("B", 2, 1, 8)), "k": (F32, shape), "v": (F32, shape)},
        ["y"],
        bound={"k": cache, "v": cache},
        bucket_sizes={"B": (2, 4)},
    )
    y = engine.run({"q": rng.standard_normal((3, 2, 1, 8), np.float32)})["y"].numpy()
    assert y.shape == (3, 2, 1, 8)
    assert np.isfinite(y).all()


def test_a_batch_beyond_the_largest_bucket_is_refused(rt: nx.CudaRuntime) -> None:
    engine = attention_engine(rt, bucket_sizes={"B": (1, 2)})
    with pytest.raises(nx.EngineError, match="B = 3 exceeds its largest bucket, 2"):
        engine.run(attention_inputs(np.random.default_rng(0), 3))


def test_an_operator_that_mixes_rows_cannot_be_padded(rt: nx.CudaRuntime) -> None:
    nodes = [combine(["x"], "a"), combine(["a"], "y", **{"mixes rows": 1})]
    engine = nx.Engine(rt, nodes, {"x": (F32, ("B", 4))}, ["y"], bucket_sizes={"B": (2,)})
    with pytest.raises(nx.UnsupportedError) as refusal:
        engine.prepare({"B": 1})
    assert str(refusal.value) == (
        "'B' cannot have bucket sizes: make y (test::Combine) does not treat axis 0 of 'a' as a batch"
    )


def test_a_mask_of_rank_2_has_no_batch(rt: nx.CudaRuntime) -> None:
    """Its axis 0 is the query's positions, which a batch symbol there would pad."""
    engine = nx.Engine(
        rt,
        [(nx.Node("Attention"), ["q", "k", "v", "mask"], ["y"])],
        {**dict.fromkeys("qkv", (F32, (1, 1, 4, 8))), "mask": (F32, ("S", 4))},
        ["y"],
        bucket_sizes={"S": (4,)},
    )
    with pytest.raises(nx.UnsupportedError, match="does not treat axis 0 of 'mask' as a batch"):
        engine.prepare({"S": 3})


def test_a_batch_of_another_source_cannot_stand_beside_a_padded_one(rt: nx.CudaRuntime) -> None:
    """Its rows would meet the padding; an exact engine refuses the call too."""
    nodes, weight = [combine(["x", "w"], "y")], np.zeros((2, 4), np.float32)
    engine = nx.Engine(rt, nodes, {"x": (F32, ("B", 4))}, ["y"], bound={"w": weight}, bucket_sizes={"B": (2,)})
    with pytest.raises(nx.UnsupportedError, match="make y reads a batch of 2 from 'w' beside the padded one"):
        engine.prepare({"B": 1})


def test_two_padded_symbols_do_not_meet(rt: nx.CudaRuntime) -> None:
    declared = {"x": (F32, ("B", 4)), "z": (F32, ("C", 4))}
    engine = nx.Engine(rt, [combine(["x", "z"], "y")], declared, ["y"], bucket_sizes={"B": (2,), "C": (2,)})
    with pytest.raises(nx.UnsupportedError, match="make y reads batches padded by different symbols: B, C"):
        engine.prepare({"B": 1, "C": 2})
