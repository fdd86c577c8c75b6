"""An engine runs its nodes as eager kernels would, from one plan, and says what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.kernel import kernel_factory
from nxrt_cuda.testing import count
from tests.engine.operators import CombineKernel, Nodes, combine, evaluate, random_nodes
from tests.small_kernels import ADD_ONE, FAULT, Background, open_on

F32 = nx.float32
B, H, D, KEYS, TOP_K = 2, 4, 16, 40, 8

SELECT = nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": TOP_K, "scale": D**-0.5}, name="select")
ATTEND = nx.Node("Attention", attributes={"is_causal": 1}, name="attend")
AGAIN = nx.Node("Attention", name="attend again")


def layer_engine(rt: nx.CudaRuntime, **options: Any) -> nx.Engine:
    """Key selection, and two attentions of which one feeds the other, one with lengths but no mask."""
    cache = (F32, (B, H, KEYS, D))
    return nx.Engine(
        rt,
        nodes=[
            (SELECT, ["query", "index keys", "weights", "bias"], ["selected"]),
            (ATTEND, ["heads", "keys", "values", None, "lengths"], ["context"]),
            (AGAIN, ["context", "keys", "values"], ["refined"]),
        ],
        inputs={
            "query": (F32, (B, 1, H, D)),
            "index keys": (F32, (B, KEYS, D)),
            "weights": (F32, (B, 1, H)),
            "bias": (F32, (B, 1, 1, KEYS)),
            "heads": (F32, (B, H, 1, D)),
            "keys": cache,
            "values": cache,
            "lengths": (nx.int32, (B,)),
        },
        outputs=["selected", "refined"],
        **options,
    )


def layer_inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    lengths = rng.integers(1, KEYS + 1, B).astype(np.int32)
    seen = np.arange(KEYS) < lengths[:, None, None, None]
    return {
        "query": rng.standard_normal((B, 1, H, D), np.float32),
        "index keys": rng.standard_normal((B, KEYS, D), np.float32),
        "weights": rng.random((B, 1, H), np.float32),
        "bias": np.where(seen, 0, -np.inf).astype(np.float32),
        "heads": rng.standard_normal((B, H, 1, D), np.float32),
        "keys": rng.standard_normal((B, H, KEYS, D), np.float32),
        "values": rng.standard_normal((B, H, KEYS, D), np.float32),
        "lengths": lengths,
    }


class Eager:
    """The same kernels, executed one by one on tensors of their own."""

    def __init__(self, rt: nx.CudaRuntime) -> None:
        self.rt = rt
        self.kernels = [nx.create_kernel(rt, node) for node in (SELECT, ATTEND, AGAIN)]

    def __call__(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rt = self.rt
        t = {name: rt.from_array(array) for name, array in arrays.items()}
        selected = rt.empty((B, 1, 1, TOP_K), nx.int64)
        context, refined = rt.empty((B, H, 1, D), F32), rt.empty((B, H, 1, D), F32)
        select, attend, again = self.kernels
        select.execute([t["query"], t["index keys"], t["weights"], t["bias"]], [selected])
        attend.execute([t["heads"], t["keys"], t["values"], None, t["lengths"]], [context])
        again.execute([context, t["keys"], t["values"]], [refined])
        return {"selected": selected.numpy(), "refined": refined.numpy()}


def simple_engine(rt: nx.CudaRuntime, nodes: Nodes | None = None, **options: Any) -> nx.Engine:
    """``y = 0.5 * x + x`` of eight numbers, unless other nodes are given."""
    return nx.Engine(rt, nodes or [combine(["x", "x"], "y")], {"x": (F32, (8,))}, ["y"], **options)


X = np.arange(8, dtype=np.float32)


def test_a_hundred_runs_of_changing_contents_equal_eager(rt: nx.CudaRuntime) -> None:
    """Byte for byte, from one capture; a steady run launches, allocates and compiles nothing."""
    rng = np.random.default_rng(1)
    engine, eager = layer_engine(rt), Eager(rt)
    engine.prepare()
    kept = engine.run(layer_inputs(rng))
    for _ in range(100):
        arrays = layer_inputs(rng)
        expected = eager(arrays)
        with count(rt) as seen:
            outputs = engine.run(arrays)
        assert (seen.launches, seen.allocations, seen.compiles, seen.replays) == (0, 0, 0, 1)
        assert seen.htod_copies == len(arrays)
        assert seen.stats.synchronizations == 0
        for name, output in outputs.items():
            np.testing.assert_array_equal(output.numpy(), expected[name], err_msg=name)
            assert output is kept[name], "the same memory every time"
    report = engine.report()
    assert (report.captures, report.replays, report.eager_runs) == (1, 101, 0)
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE, "warming up on zeros latches nothing"


@pytest.mark.parametrize("declined", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_compute_what_numpy_computes(rt: nx.CudaRuntime, seed: int, declined: float) -> None:
    """In any order of the nodes, with buffers that share memory and kernels between the segments."""
    rng = np.random.default_rng(seed)
    nodes, unread = random_nodes(rng, 25, declined=declined)
    shuffled = [nodes[index] for index in rng.permutation(len(nodes))]
    shape = (3, 50)
    engine = nx.Engine(rt, shuffled, {"x": (F32, shape), "y": (F32, shape)}, unread)
    for _ in range(5):
        values = {name: rng.standard_normal(shape, np.float32) for name in "xy"}
        expected = evaluate(nodes, values)
        for name, output in engine.run(values).items():
            np.testing.assert_array_equal(output.numpy(), expected[name], err_msg=name)
    (bucket,) = engine.report().buckets
    assert bucket.buffers == 27
    assert bucket.buffer_nbytes < bucket.buffer_nbytes_without_reuse == 27 * 768
    assert {node.name for node in bucket.nodes if not node.is_captured} == {
        node.name for node, _, _ in nodes if "decline" in node.attributes
    }


def test_the_sequence_is_cut_around_kernels_that_decline(rt: nx.CudaRuntime) -> None:
    """Captured, eager, captured, eager, eager, captured: three segments, and every reason in the report."""
    letters = "cdcddc"
    nodes = [
        combine([f"t{i}"], f"t{i + 1}", **({"decline": f"reads lengths on the host ({i})"} if letter == "d" else {}))
        for i, letter in enumerate(letters)
    ]
    engine = nx.Engine(rt, nodes, {"t0": (F32, (8,))}, ["t6"])
    engine.prepare()
    with count(rt) as seen:
        output = engine.run({"t0": X * 64})["t6"].numpy()
    np.testing.assert_array_equal(output, X)
    assert (seen.launches, seen.replays) == (3, 3)
    report = engine.report()
    assert (report.captures, report.replays, report.eager_runs) == (3, 3, 3)
    assert [(node.is_captured, node.reason) for node in report.buckets[0].nodes] == [
        (letter == "c", "" if letter == "c" else f"reads lengths on the host ({i})") for i, letter in enumerate(letters)
    ]


def test_a_kernel_that_launches_nothing_is_not_recorded(rt: nx.CudaRuntime) -> None:
    """An empty batch is a run like any other; a graph without nodes would not be one."""
    engine = nx.Engine(rt, [combine(["x"], "y")], {"x": (F32, ("B", 4))}, ["y"])
    assert engine.run({"x": np.zeros((0, 4), np.float32)})["y"].shape == (0, 4)
    (bucket,) = engine.report().buckets
    assert (bucket.segments, bucket.nodes[0].reason) == (0, "launches nothing for these shapes")


def test_tensors_are_copied_on_the_device_and_arrays_are_cast(rt: nx.CudaRuntime) -> None:
    """A tensor makes no transfer; a list of numbers is as good as an array; another kind of number is not."""
    engine = simple_engine(rt)
    tensor = rt.from_array(X)
    with count(rt) as seen:
        outputs = engine.run({"x": tensor})
    assert (seen.htod_copies, seen.stats.dtod_copies) == (0, 1)
    np.testing.assert_array_equal(outputs["y"].numpy(), 1.5 * X)
    np.testing.assert_array_equal(engine.run({"x": [float(i) for i in range(8)]})["y"].numpy(), 1.5 * X)
    with pytest.raises(nx.TensorError, match="cannot cast complex64 to Float32"):
        engine.run({"x": X * 1j})
    with pytest.raises(nx.TensorError, match="copy of Int64"):
        engine.run({"x": rt.from_array(np.arange(8))})
    with pytest.raises(nx.TensorError, match="strided"):
        engine.run({"x": _every_other(rt)})
    np.testing.assert_array_equal(engine.run({"x": X})["y"].numpy(), 1.5 * X)


def _every_other(rt: nx.CudaRuntime) -> nx.TensorView:
    whole = rt.from_array(np.zeros(16, np.float32))
    return nx.TensorView(whole.ptr, nx.TensorMetadata(F32, (8,), (2,)), whole.owner)


def test_outputs_are_overwritten_by_the_next_run_and_copies_are_not(rt: nx.CudaRuntime) -> None:
    engine = simple_engine(rt)
    own = engine.run({"x": X})["y"]
    copied = engine.run({"x": X}, copy_outputs=True)["y"]
    engine.run({"x": -X})
    np.testing.assert_array_equal(own.numpy(), -1.5 * X)
    np.testing.assert_array_equal(copied.numpy(), 1.5 * X)


def test_a_bound_tensor_is_read_in_place(rt: nx.CudaRuntime) -> None:
    """The caller changes its contents between runs, without a copy and without a capture."""
    weight = rt.from_array(X)
    engine = simple_engine(rt, [combine(["x", "w"], "y")], bound={"w": weight})
    np.testing.assert_array_equal(engine.run({"x": X})["y"].numpy(), 1.5 * X)
    weight.copy_from(10 * X)
    with count(rt) as seen:
        output = engine.run({"x": X})["y"]
    assert (seen.htod_copies, seen.stats.dtod_copies, seen.replays) == (1, 0, 1)
    np.testing.assert_array_equal(output.numpy(), 10.5 * X)
    with pytest.raises(nx.EngineError, match="there is no input 'w'"):
        engine.run({"x": X, "w": X})


def test_a_bound_tensor_cannot_be_freed_under_the_engine(rt: nx.CudaRuntime) -> None:
    weight = rt.from_array(X)
    engine = simple_engine(rt, [combine(["x", "w"], "y")], bound={"w": weight}, name="mine")
    engine.prepare()
    with pytest.raises(nx.DeviceMemoryError, match="is referred to by mine"):
        weight.free()
    engine.close()
    weight.free()


@pytest.mark.parametrize("declined", [["h"], ["h", "y"]], ids=["some kernels recorded", "none recorded"])
def test_memory_of_kernels_that_are_not_recorded_cannot_be_freed_under_the_engine(
    rt: nx.CudaRuntime, declined: list[str]
) -> None:
    """Neither the engine's own nor what is bound; once it is closed, both may go."""
    weight = rt.from_array(X)
    attributes = {name: {"decline": "no"} if name in declined else {} for name in "hy"}
    nodes = [combine(["x", "w"], "h", **attributes["h"]), combine(["h"], "y", **attributes["y"])]
    engine = simple_engine(rt, nodes, bound={"w": weight}, name="mine")
    output = engine.run({"x": X})["y"]
    for tensor in (weight, output):
        with pytest.raises(nx.DeviceMemoryError, match="is referred to by mine; let go"):
            tensor.free()
    np.testing.assert_array_equal(engine.run({"x": X})["y"].numpy(), 0.75 * X)
    engine.close()
    for tensor in (weight, output):
        tensor.free()


def test_a_bound_array_is_uploaded_once(rt: nx.CudaRuntime) -> None:
    engine = simple_engine(rt, [combine(["x", "w"], "y")], bound={"w": 2 * X})
    for _ in range(3):
        np.testing.assert_array_equal(engine.run({"x": X})["y"].numpy(), 2.5 * X)
    assert rt.stats().htod_copies == 4


def test_each_bucket_sees_the_front_of_a_larger_bound_tensor(rt: nx.CudaRuntime) -> None:
    """A cache for eight sequences of up to 64 keys serves every batch and length, where the kernel takes it strided."""
    rng = np.random.default_rng(3)
    keys, values = (rng.standard_normal((8, 2, 64, D), np.float32) for _ in range(2))
    window = (F32, ("B", 2, "T", D))
    engine = nx.Engine(
        rt,
        [(nx.Node("Attention"), ["q", "k", "v", "mask"], ["y"])],
        inputs={"q": (F32, ("B", 2, 1, D)), "mask": (F32, ("B", 1, 1, "T")), "k": window, "v": window},
        outputs=["y"],
        bound={"k": rt.from_array(keys), "v": rt.from_array(values)},
    )
    for batch, length in ((8, 64), (3, 10), (1, 1)):
        q = rng.standard_normal((batch, 2, 1, D), np.float32)
        y = engine.run({"q": q, "mask": np.zeros((batch, 1, 1, length), np.float32)})["y"].numpy()
        scores = np.einsum("bhqd,bhkd->bhqk", q, keys[:batch, :, :length]) * D**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(y, weights @ values[:batch, :, :length], atol=1e-5)
    with pytest.raises(nx.EngineError, match=r"bound tensor 'k' is Float32 \(8, 2, 64, 16\); at least Float32 \(9, "):
        engine.run({"q": np.zeros((9, 2, 1, D), np.float32), "mask": np.zeros((9, 1, 1, 1), np.float32)})


def test_a_bound_tensor_of_another_dtype_is_refused(rt: nx.CudaRuntime) -> None:
    declared = {"x": (F32, (8,)), "w": (F32, (8,))}
    with pytest.raises(nx.EngineError, match="bound tensor 'w' is Int64"):
        nx.Engine(rt, [combine(["x", "w"], "y")], declared, ["y"], bound={"w": np.arange(8)})


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({}, "input 'x' is missing"),
        ({"x": X[:4]}, r"input 'x' has shape \(4,\), declared \(8,\)"),
        ({"x": X, "q": X}, "there is no input 'q'"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_happens(
    rt: nx.CudaRuntime, inputs: dict[str, Any], problem: str
) -> None:
    engine = simple_engine(rt)
    y = engine.run({"x": X})["y"]
    before = rt.stats(), engine.report()
    with pytest.raises(nx.EngineError, match=problem):
        engine.run(inputs)
    assert (rt.stats(), engine.report()) == before
    np.testing.assert_array_equal(y.numpy(), 1.5 * X)


def test_nodes_that_no_kernel_serves_are_all_named(rt: nx.CudaRuntime) -> None:
    """At once where the shapes are known, else at the first call of those shapes; nothing is allocated."""
    nodes = [combine(["x", "w"], "a"), combine(["x", "v"], "b"), combine(["x"], "c"), combine(["a", "c"], "d")]
    declared = {"x": (F32, (8,)), "w": (F32, (9,)), "v": (F32, (7,))}
    with pytest.raises(nx.UnsupportedError) as refusal:
        nx.Engine(rt, nodes, declared, ["b", "d"])
    assert str(refusal.value) == (
        "no kernel serves make a (test::Combine): Combine: shapes (8,) and (9,) differ; "
        "make b (test::Combine): Combine: shapes (8,) and (7,) differ"
    )
    engine = nx.Engine(rt, nodes[:1], {"x": (F32, ("N",)), "w": (F32, (9,))}, ["a"])
    before = rt.stats()
    with pytest.raises(nx.UnsupportedError, match=r"shapes \(8,\) and \(9,\) differ"):
        engine.prepare({"N": 8})
    assert rt.stats() == before
    engine.prepare({"N": 9})


def test_operators_without_a_kernel_are_all_named(rt: nx.CudaRuntime) -> None:
    nodes = [(nx.Node("Relu"), ["x"], ["a"]), (nx.Node("Gelu", "com.microsoft"), ["a"], ["y"])]
    with pytest.raises(nx.UnsupportedError, match=r"no kernel for ai\.onnx::Relu, com\.microsoft::Gelu; there are"):
        simple_engine(rt, nodes)


def test_an_operator_that_does_not_say_its_outputs_is_refused(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.UnsupportedError, match="SilentFactory does not say what outputs Silent has"):
        simple_engine(rt, [(nx.Node("Silent", "test"), ["x"], ["y"])])


def test_every_operator_of_the_package_can_be_part_of_an_engine() -> None:
    """Each says what its outputs are, and which of its inputs have a batch."""
    for domain, op_type in nx.registered_ops():
        if domain != "test":
            factory = kernel_factory(nx.Node(op_type, domain))
            assert "output_metadata" in vars(factory), factory
            assert "batch_inputs" in vars(factory), factory


def test_names_for_more_outputs_than_there_are_are_refused(rt: nx.CudaRuntime) -> None:
    node, inputs, _ = combine(["x"], "y")
    with pytest.raises(nx.EngineError, match=r"make y has 1 output\(s\), and 2 name\(s\) for them"):
        nx.Engine(rt, [(node, inputs, ["y", "z"])], {"x": (F32, (8,))}, ["y", "z"])


def test_wrong_wiring_is_refused(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.EngineError, match="'z', input 1 of make y, is undefined"):
        simple_engine(rt, [combine(["x", "z"], "y")])


def test_an_engine_does_not_run_in_a_capture(rt: nx.CudaRuntime) -> None:
    """The capture stays usable, and has nothing of the engine in it."""
    engine, x = simple_engine(rt), rt.from_array(X)
    launch = ADD_ONE.prepare(rt, 8, x, 8)
    with rt.capture() as graph:
        with pytest.raises(nx.CaptureError, match="engine cannot run while this thread captures"):
            engine.run({"x": x})
        with pytest.raises(nx.CaptureError, match="cannot run while this thread captures"):
            engine.prepare()
        rt.launch(launch)
    assert graph.node_count == 1
    np.testing.assert_array_equal(engine.run({"x": X})["y"].numpy(), 1.5 * X)


def test_closing_in_a_capture_is_refused_and_leaves_the_engine_open(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), F32)
    with layer_engine(rt) as engine:
        with rt.capture():
            rt.fill_zero(x)
            with pytest.raises(nx.CaptureError, match="engine cannot close while this thread captures a CUDA graph"):
                engine.close()
        assert not engine.is_closed
        engine.run(layer_inputs(np.random.default_rng(0)))


def test_names_are_given_as_lists_and_inputs_by_name(rt: nx.CudaRuntime) -> None:
    outputs: Any = "ab"
    with pytest.raises(nx.EngineError, match="outputs is 'ab'; give a list of names"):
        nx.Engine(rt, [combine(["x"], "a"), combine(["x"], "b")], {"x": (F32, (4,))}, outputs)
    inputs: Any = [np.zeros(4, np.float32)]
    with (
        nx.Engine(rt, [combine(["x"], "y")], {"x": (F32, (4,))}, ["y"]) as engine,
        pytest.raises(nx.EngineError, match="inputs are given by name, in a dict; got a list"),
    ):
        engine.run(inputs)


def test_closing_gives_everything_back(rt: nx.CudaRuntime) -> None:
    """But for what somebody holds: an output stays readable."""
    live = rt.stats().live_bytes
    with layer_engine(rt) as engine:
        output = engine.run(layer_inputs(np.random.default_rng(0)))["refined"]
        assert engine.report().nbytes > 0
    assert engine.is_closed
    assert np.isfinite(output.numpy()).all()
    del output
    rt.synchronize()
    rt.trim_pool()
    assert rt.stats().live_bytes <= live
    with pytest.raises(nx.RuntimeStateError, match="engine is closed"):
        engine.run({})
    with pytest.raises(nx.RuntimeStateError, match="engine is closed"):
        engine.prepare()
    engine.close()


def test_a_dropped_engine_gives_everything_back(rt: nx.CudaRuntime) -> None:
    live = rt.stats().live_bytes
    layer_engine(rt).run(layer_inputs(np.random.default_rng(0)))
    rt.synchronize()
    rt.trim_pool()
    assert rt.stats().live_bytes <= live


def test_an_engine_outlives_its_runtime_harmlessly() -> None:
    with nx.open_runtime("host") as runtime:
        engine = nx.Engine(runtime, [(AGAIN, ["q", "k", "v"], ["y"])], dict.fromkeys("qkv", (F32, (1, 1, 2, 4))), ["y"])
        engine.prepare()
    with pytest.raises(nx.RuntimeStateError, match="the runtime of engine is closed"):
        engine.run({name: np.zeros((1, 1, 2, 4), np.float32) for name in "qkv"})
    engine.close()


def test_threads_share_an_engine(rt: nx.CudaRuntime) -> None:
    """Inputs of one run never meet the outputs of another."""
    engine = simple_engine(rt, [combine(["x"], "a"), combine(["a"], "b", decline="no"), combine(["b"], "y")])
    engine.prepare()
    wrong: list[int] = []

    def work(factor: int) -> None:
        for _ in range(40):
            y = engine.run({"x": factor * 8 * X}, copy_outputs=True)["y"]
            if not np.array_equal(y.numpy(), factor * X):
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert engine.report().eager_runs == 160


def test_a_run_waits_for_the_capture_of_another_thread(rt: nx.CudaRuntime) -> None:
    engine, x = simple_engine(rt), rt.from_array(X)
    launch = ADD_ONE.prepare(rt, 8, x, 8)
    engine.prepare()
    with rt.capture() as graph:
        background = Background(engine.run, {"x": X})
        background.__enter__()
        rt.launch(launch)
        assert not background.done.wait(0.05)
    background.__exit__(None, None, None)
    assert graph.node_count == 1
    np.testing.assert_array_equal(background.result["y"].numpy(), 1.5 * X)


def test_a_kernel_that_fails_in_the_warm_up_leaves_the_engine_usable(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = simple_engine(rt)

    def fail(*_: object) -> None:
        raise nx.KernelError("Combine", "not today")

    with monkeypatch.context() as patched:
        patched.setattr(CombineKernel, "execute", fail)
        with pytest.raises(nx.KernelError, match="not today"):
            engine.run({"x": X})
    assert not engine.report().buckets
    np.testing.assert_array_equal(engine.run({"x": X})["y"].numpy(), 1.5 * X)


def test_a_kernel_that_fails_in_the_capture_raises(rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a declared refusal falls back to eager runs; what fails without one is a fault, and is raised."""
    engine = simple_engine(rt, [combine(["x"], "a"), combine(["a"], "b", decline="no"), combine(["b"], "y")])
    execute, captured = CombineKernel.execute, []

    def fail_in_second_capture(self: CombineKernel, *operands: Any) -> None:
        captured.append(rt.is_capturing())
        if sum(captured) == 2:
            raise nx.CaptureError("would allocate", operation="alloc_raw", state="capturing")
        execute(self, *operands)

    with monkeypatch.context() as patched:
        patched.setattr(CombineKernel, "execute", fail_in_second_capture)
        with pytest.raises(nx.CaptureError, match="would allocate"):
            engine.prepare()
    assert not rt.is_capturing()
    assert not engine.report().buckets
    np.testing.assert_array_equal(engine.run({"x": 8 * X})["y"].numpy(), X)


def test_after_a_device_fault_no_run_returns_data() -> None:
    from nxrt_cuda.driver.host import HostDriver
    from tests import small_kernels
    from tests.engine.operators import HOST_ENTRIES

    runtime = open_on(HostDriver({**small_kernels.HOST_ENTRIES, **HOST_ENTRIES}))
    engine = simple_engine(runtime)
    engine.run({"x": X})
    runtime.launch(FAULT.prepare(runtime, 1, 16))
    with pytest.raises(nx.DeviceFaultError):
        runtime.synchronize()
    with pytest.raises(nx.DeviceFaultError, match="restart the process"):
        engine.run({"x": X})
    runtime.close()


def test_the_report_prints_as_a_table(rt: nx.CudaRuntime) -> None:
    engine = nx.Engine(
        rt,
        [combine(["x", "x"], "a"), combine(["a"], "b", decline="asks the host"), combine(["b"], "y")],
        {"x": (F32, ("N",))},
        ["y"],
        name="small",
        max_bytes=1 << 20,
    )
    assert "buckets     0, 0 B of 1.0 MiB" in str(engine.report())
    for _ in range(2):
        engine.run({"x": X})
    assert str(engine.report()).split("\n") == [
        "small",
        "  nodes       3",
        "  buckets     1, 768 B of 1.0 MiB",
        "  captures    2",
        "  replays     4",
        "  eager runs  2",
        "  evictions   0",
        "",
        "small [N=8]",
        "  runs        2",
        "  graph       2 segment(s), 2 node(s)",
        "  buffers     4 in 768 B, 1.0 KiB without reuse",
        "  workspaces  0 B",
        "  node    op             how       reason",
        "  make a  test::Combine  captured",
        "  make b  test::Combine  eager     asks the host",
        "  make y  test::Combine  captured",
    ]


def test_a_negative_bound_is_refused(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.EngineError, match="max_bytes = -1 is negative"):
        simple_engine(rt, max_bytes=-1)


def test_an_overwritten_output_is_refused_in_debug_mode(rt: nx.CudaRuntime) -> None:
    """Wherever it is used: read, copied, exported, given to a kernel, also to one that has just used it."""
    nodes = [combine(["x"], "y")]
    engine = nx.Engine(rt, nodes, {"x": (F32, ("N", 1, 2, D))}, ["y"], name="halves", debug=True)
    shape = (2, 1, 2, D)
    kernel, copy = nx.create_kernel(rt, ATTEND, [shape] * 3), rt.empty(shape, F32)
    first = engine.run({"x": np.full(shape, 2, np.float32)})["y"]
    for _ in range(3):
        kernel.execute([first] * 3, [copy])
    assert (first.numpy() == 1).all()
    assert (copy.numpy() == 1).all()
    fed = engine.run({"x": first})["y"]
    of_other_size = engine.run({"x": np.full((3, 1, 2, D), 8, np.float32)})["y"]
    uses: list[Callable[[], object]] = [
        lambda: kernel.execute([first] * 3, [copy]),
        first.numpy,
        first.narrow(0, 1, 1).numpy,
        lambda: rt.copy(copy, first),
        first.__dlpack__,
    ]
    for use in uses:
        with pytest.raises(nx.NxrtError, match=r"was overwritten by a later run of halves \[N=2\]"):
            use()
    assert "overwritten" in repr(first)
    assert (fed.numpy() == 0.5).all()
    assert (of_other_size.numpy() == 4).all()
