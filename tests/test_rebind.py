"""Changing what a captured graph works on: values, checks, ownership, and failures of the driver half-way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver, HostLaunch
from nxrt_cuda.driver.host_tensor_map import HostTensorMap
from tests.small_kernels import ADD_ONE, FAULT, HOST_ENTRIES, SCALE, open_on
from tests.test_fault_injection import each_call_failing

REFUSED = "CUDA_ERROR_NOT_SUPPORTED"
SET = "graph_exec_kernel_node_set_params"


def full(rt: nx.CudaRuntime, value: float, count: int = 4) -> nx.TensorMut:
    return rt.from_array(np.full(count, value, np.float32))


class Step:
    """``y = 2 x``, then ``y += 1``: a graph of two kernels, and the tensors it was recorded with."""

    def __init__(self, rt: nx.CudaRuntime) -> None:
        self.x, self.y = full(rt, 1), full(rt, 0)
        self.scale = SCALE.prepare(rt, 4, self.y, self.x, 2.0, 4)
        add = ADD_ONE.prepare(rt, 4, self.y, 4)
        with rt.capture(name="step") as self.graph:
            rt.launch(self.scale)
            rt.launch(add)

    def run(self, output: nx.TensorMut | None = None) -> float:
        """The value that a replay leaves in ``output``."""
        self.graph.replay()
        values = (output or self.y).numpy()
        assert (values == values[0]).all()
        return float(values[0])


@pytest.fixture
def step(rt: nx.CudaRuntime) -> Step:
    return Step(rt)


# Values.


def test_a_replay_uses_the_new_tensor(rt: nx.CudaRuntime, step: Step) -> None:
    assert step.run() == 3
    before = rt.stats()
    step.graph.rebind({step.x: full(rt, 5)})
    assert step.run() == 11
    assert rt.stats().since(before).graph_rebinds == 1
    assert rt.stats().since(before).graphs_captured == 0


def test_a_tensor_is_replaced_wherever_it_occurs(rt: nx.CudaRuntime, step: Step) -> None:
    z = full(rt, 0)
    step.graph.rebind({step.y: z})
    assert step.run(z) == 3
    assert step.y.numpy().tolist() == [0] * 4


def test_rebinding_a_hundred_times_is_seen_by_the_very_next_replay(rt: nx.CudaRuntime, step: Step) -> None:
    current = step.x
    for value in range(100):
        new = full(rt, value)
        step.graph.rebind({current: new})
        assert step.run() == 2 * value + 1
        current = new


def test_a_replay_under_way_keeps_what_it_had(rt: nx.CudaRuntime, step: Step) -> None:
    """It was queued before, and runs only now; its memory is not given away under it."""
    z = full(rt, 0)
    step.graph.replay()
    step.graph.rebind({step.x: full(rt, 5), step.y: z})
    step.graph.replay()
    assert step.y.numpy().tolist() == [3] * 4
    assert z.numpy().tolist() == [11] * 4


def test_pairs_are_replaced_at_once(rt: nx.CudaRuntime) -> None:
    """Two tensors change places."""
    a, b = full(rt, 1), full(rt, 10)
    launch = SCALE.prepare(rt, 4, b, a, 2.0, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.rebind({a: b, b: a})
    graph.replay()
    assert (a.numpy()[0], b.numpy()[0]) == (20, 10)


def test_parts_of_a_tensor_move_with_it(rt: nx.CudaRuntime) -> None:
    """Kernels that were recorded with a row of it get the same row of the new one."""
    old, new = rt.zeros((3, 8), nx.float32), rt.zeros((3, 8), nx.float32)
    row = ADD_ONE.prepare(rt, 8, old.narrow(0, 1, 1), 8)
    with rt.capture() as graph:
        rt.launch(row)
    graph.rebind({old: new})
    graph.replay()
    assert new.numpy().sum(1).tolist() == [0, 8, 0]
    assert old.numpy().sum() == 0
    graph.rebind({new.narrow(0, 1, 1): old.narrow(0, 2, 1)})
    graph.replay()
    assert old.numpy().sum(1).tolist() == [0, 0, 8]


def test_copies_and_fills_are_rebound(rt: nx.CudaRuntime) -> None:
    a, b, c, d = (full(rt, value) for value in (1, 2, 3, 4))
    with rt.capture() as graph:
        rt.copy(b, a)
        rt.fill_zero(a)
    assert graph.node_types == ("MEMCPY", "MEMSET")
    graph.rebind({a: c, b: d})
    graph.replay()
    assert [int(t.numpy()[0]) for t in (a, b, c, d)] == [1, 2, 0, 3]


def test_every_segment_is_rebound(rt: nx.CudaRuntime, step: Step) -> None:
    with rt.capture(into=step.graph):
        rt.launch(ADD_ONE.prepare(rt, 4, step.y, 4))
    z = full(rt, 0)
    step.graph.rebind({step.y: z})
    assert step.run(z) == 4
    assert step.y.numpy().tolist() == [0] * 4


def test_kernel_objects_launch_as_before_whatever_a_graph_was_rebound_to(rt: nx.CudaRuntime, step: Step) -> None:
    """The graph has arguments of its own, and so has whoever recorded it."""
    step.graph.rebind({step.x: full(rt, 5)})
    rt.launch(step.scale)
    assert step.y.numpy()[0] == 2
    step.scale.set(2, 100.0)
    assert step.run() == 11


def test_numbers_are_changed_by_index_or_by_entry(rt: nx.CudaRuntime, step: Step) -> None:
    step.graph.rebind(scalars={(0, "factor"): 3.0})
    assert step.run() == 4
    step.graph.rebind({step.x: full(rt, 5)}, scalars={("scale", "factor"): 4.0, (1, "n"): 4})
    assert step.run() == 21


def test_an_index_counts_all_that_was_recorded(rt: nx.CudaRuntime, step: Step) -> None:
    """Copies too, those of no bytes, and the segments before."""
    empty = rt.empty((0,), nx.float32)
    with rt.capture(into=step.graph):
        rt.fill_zero(empty)
        rt.launch(step.scale)
    step.graph.rebind(scalars={(3, "factor"): 7.0})
    assert step.graph.kernels[2] == "memset"
    assert step.run() == 7


def test_operators_are_rebound(rt: nx.CudaRuntime) -> None:
    """All operands of Attention, which has a workspace and its own argument block."""
    random = np.random.default_rng(0)
    q, k, other = (random.standard_normal((1, 2, 8, 16), np.float32) for _ in range(3))
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    tensors = [rt.from_array(array) for array in (q, k, k)]
    out, new_out = rt.empty(q.shape, nx.float32), rt.zeros(q.shape, nx.float32)
    kernel.execute(tensors, [out])
    with rt.capture([kernel]) as graph:
        kernel.execute(tensors, [out])
    new_query = rt.from_array(other)
    kernel.execute([new_query, *tensors[1:]], [out])
    expected = out.numpy()
    graph.rebind({tensors[0]: new_query, out: new_out})
    graph.replay()
    np.testing.assert_array_equal(new_out.numpy(), expected)


def through_map(launch: HostLaunch) -> None:
    """``out = x``, where ``x`` is what the tensor map is of."""
    tensor_map = HostTensorMap.decode(launch.args["x"])
    launch.view(launch.args["out"], nx.float32, (4,))[:] = launch.view(tensor_map.address, nx.float32, (4,))


def test_tensor_maps_are_made_anew_for_the_new_address() -> None:
    """Of the launch in the graph only, also where it was recorded with a part of the tensor."""
    with nx.open_runtime("host", host_entries={"through_map": through_map}) as rt:
        x, y = rt.from_array(np.arange(8, dtype=np.float32)), rt.zeros((4,), nx.float32)
        part = x.narrow(0, 4, 4)
        function = rt.nvrtc_function("m", "", "through_map", [("out", "ptr"), ("x", "tensor_map")])
        tensor_map = rt.tensor_map(nx.float32, part.ptr, (4,), (), (4,))
        launch = rt.prepare(function, nx.LaunchConfig((1, 1, 1), (32, 1, 1)), y, tensor_map)
        with rt.capture(name="g") as graph:
            rt.launch(launch, [y, part])
        graph.replay()
        assert y.numpy().tolist() == [4, 5, 6, 7]
        new = rt.from_array(np.arange(8, dtype=np.float32) + 10)
        graph.rebind({x: new})
        graph.replay()
        assert y.numpy().tolist() == [14, 15, 16, 17]
        assert (x.owner.pins, new.owner.pins) == ([], ["g"])
        rt.launch(launch)
        assert y.numpy().tolist() == [4, 5, 6, 7]
        with (
            rt._driver.fail_call(error=REFUSED, call="tensor_map_replace_address"),
            pytest.raises(nx.GraphError, match=r"node 0 \(through_map .*NOT_SUPPORTED"),
        ):
            graph.rebind({new: x})
        graph.replay()
        assert y.numpy().tolist() == [14, 15, 16, 17]


# Ownership.


def test_pins_move_from_the_old_memory_to_the_new(rt: nx.CudaRuntime, step: Step) -> None:
    new = full(rt, 5)
    step.graph.rebind({step.x: new})
    assert (step.x.owner.pins, new.owner.pins) == ([], ["step"])
    step.x.free()
    with pytest.raises(nx.DeviceMemoryError, match="referred to by step"):
        new.free()
    step.graph.close()
    new.free()


def test_memory_that_only_the_graph_held_is_given_back_in_stream_order(rt: nx.CudaRuntime, step: Step) -> None:
    """The replay under way still reads it, although somebody else has been given the block since."""
    old = weakref.ref(step.x.owner)
    address = step.x.ptr
    step.graph.replay()
    step.graph.rebind({step.x: full(rt, 5)})
    del step.x, step.scale
    gc.collect()
    assert old() is None
    reused = full(rt, 77)
    assert reused.ptr == address
    assert step.y.numpy()[0] == 3


def test_the_graph_keeps_the_new_memory_alive(rt: nx.CudaRuntime, step: Step) -> None:
    step.graph.rebind({step.x: full(rt, 5)})
    gc.collect()
    held = [full(rt, 9) for _ in range(5)]
    assert step.run() == 11
    assert len(held) == 5


def test_memory_with_two_users_stays_pinned_until_both_have_left(rt: nx.CudaRuntime) -> None:
    whole = rt.zeros((2, 64), nx.float32)
    launches = [ADD_ONE.prepare(rt, 64, whole.narrow(0, row, 1), 64) for row in (0, 1)]
    with rt.capture(name="g") as graph:
        for launch in launches:
            rt.launch(launch)
    first, second = rt.zeros((1, 64), nx.float32), rt.zeros((1, 64), nx.float32)
    graph.rebind({whole.narrow(0, 0, 1): first})
    assert whole.owner.pins == ["g"]
    graph.rebind({whole.narrow(0, 1, 1): second})
    assert (whole.owner.pins, first.owner.pins, second.owner.pins) == ([], ["g"], ["g"])
    assert graph.nbytes == first.nbytes + second.nbytes


# What is refused, before anything has changed.


def refusals(rt: nx.CudaRuntime, step: Step) -> dict[str, tuple[dict[str, Any], type[nx.NxrtError], str]]:
    freed = full(rt, 0)
    freed.free()
    wide = rt.zeros((16,), nx.float32)
    matrix = rt.zeros((4, 2), nx.float32).narrow(1, 0, 1)
    read_only = nx.TensorView(wide.ptr, step.x.metadata, wide.owner)
    return {
        "a tensor that it does not use": (
            {"tensors": {full(rt, 0): full(rt, 0)}}, nx.GraphError, "no kernel, copy or fill in it uses"
        ),
        "another shape": (
            {"tensors": {step.x: full(rt, 0, 5)}}, nx.GraphError, r"shape \(5,\) of .* is not \(4,\).*capture again"
        ),
        "another dtype": ({"tensors": {step.x: rt.zeros((4,), nx.int32)}}, nx.GraphError, "Int32 of .* is not Float32"),
        "other strides": (
            {"tensors": {step.x.reshape((4, 1)): matrix}}, nx.GraphError, r"strides \(2, 1\) of .* is not \(1, 1\)"
        ),
        "freed memory": ({"tensors": {step.x: freed}}, nx.DeviceMemoryError, "was freed"),
        "a weaker alignment": (
            {"tensors": {step.x: wide.narrow(0, 1, 4)}}, nx.GraphError, "less aligned .* a multiple of 32 bytes"
        ),
        "read-only memory": ({"tensors": {step.x: read_only}}, nx.GraphError, "read-only"),
        "an output on an input": ({"tensors": {step.x: step.y}}, nx.GraphError, "overlaps .* tensors apart"),
        "a part of a tensor": (
            {"tensors": {step.x.narrow(0, 0, 2): full(rt, 0, 2)}}, nx.GraphError, "is a part; replace the whole"
        ),
        "one tensor twice": (
            {"tensors": {step.x: full(rt, 0), step.x.reshape((4,)): full(rt, 0)}}, nx.GraphError, "overlap"
        ),
        "no tensor": ({"tensors": {step.x: [0, 0, 0, 0]}}, nx.TensorError, "expected tensors .* got list$"),
        "an address": ({"tensors": {step.x.ptr: step.y}}, nx.TensorError, "expected tensors of this package, got"),
        "a number without a launch": ({"scalars": {"n": 1}}, nx.GraphError, r"by \(launch, parameter\), not by 'n'"),
        "no such launch": ({"scalars": {(2, "n"): 1}}, nx.GraphError, "no launch number 2; it has scale .*, add_one"),
        "no such entry": ({"scalars": {("scales", "n"): 1}}, nx.GraphError, "no launch of 'scales'"),
        "no such parameter": (
            {"scalars": {(0, "m"): 1}}, nx.GraphError, "scale has no parameter 'm'; it has out, x, factor, n"
        ),
        "a pointer as a number": ({"scalars": {(0, "x"): 1}}, nx.GraphError, "is an address; give the tensor"),
        "a number of another kind": ({"scalars": {(0, "n"): 1.5}}, nx.LaunchError, "got 1.5"),
        "a number that does not fit": ({"scalars": {(0, "n"): 2**31}}, nx.LaunchOverflowError, "does not fit int"),
    }  # fmt: skip


def test_tensors_are_replaced_by_a_mapping(rt: nx.CudaRuntime, step: Step) -> None:
    pair: Any = [step.x, full(rt, 0)]
    with pytest.raises(nx.TensorError, match=r"cannot rebind step: give \{old: new\}, got a list"):
        step.graph.rebind(pair)


@pytest.mark.parametrize("what", [
    "a tensor that it does not use", "another shape", "another dtype", "other strides", "freed memory",
    "a weaker alignment", "read-only memory", "an output on an input", "a part of a tensor", "one tensor twice",
    "no tensor", "an address", "a number without a launch", "no such launch", "no such entry", "no such parameter",
    "a pointer as a number", "a number of another kind", "a number that does not fit",
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(rt: nx.CudaRuntime, step: Step, what: str) -> None:
    """Not even what did fit in the same call."""
    arguments, error, message = refusals(rt, step)[what]
    z = full(rt, 0)
    calls = rt._driver.calls.copy()
    arguments.setdefault("tensors", {})
    if step.y not in arguments["tensors"].values():
        arguments["tensors"] = {step.y: z, **arguments["tensors"]}
    with pytest.raises(error, match=message):
        step.graph.rebind(arguments.pop("tensors"), **arguments)
    assert rt._driver.calls[SET] == calls[SET]
    assert z.owner.pins == []
    assert step.run() == 3
    assert rt.stats().graph_rebinds == 0


def test_an_alignment_that_was_not_there_before_is_not_asked_for(rt: nx.CudaRuntime) -> None:
    wide = rt.zeros((16,), nx.float32)
    old, new = wide.narrow(0, 1, 4), wide.narrow(0, 9, 4)
    launch = ADD_ONE.prepare(rt, 4, old, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.rebind({old: new})
    graph.replay()
    assert wide.numpy().nonzero()[0].tolist() == [9, 10, 11, 12]


def test_tensors_of_another_runtime_are_refused(rt: nx.CudaRuntime, step: Step) -> None:
    with (
        nx.open_runtime("host", host_entries=HOST_ENTRIES) as other,
        pytest.raises(nx.DeviceMemoryError, match="belongs to another runtime"),
    ):
        step.graph.rebind({step.x: full(other, 1)})


def test_a_rebind_is_illegal_in_a_capture_and_leaves_it_usable(rt: nx.CudaRuntime, step: Step) -> None:
    new = full(rt, 5)
    with rt.capture() as second:
        with pytest.raises(nx.CaptureError, match="rebind"):
            step.graph.rebind({step.x: new})
        rt.launch(step.scale)
    assert second.node_count == 1


def test_a_graph_without_executables_is_not_rebound(rt: nx.CudaRuntime, step: Step) -> None:
    step.graph.close()
    with pytest.raises(nx.GraphError, match="cannot rebind step because it is closed"):
        step.graph.rebind({step.x: full(rt, 5)})


# The driver refuses.


def test_a_node_that_the_driver_refuses_is_changed_with_the_whole_graph(rt: nx.CudaRuntime, step: Step) -> None:
    driver = rt._driver
    with driver.fail_call(error=REFUSED, call=SET) as failure:
        step.graph.rebind({step.x: full(rt, 5)})
    assert failure.fired
    assert driver.calls["graph_exec_update"] == 1
    assert step.run() == 11


def test_what_an_earlier_rebind_changed_survives_an_update_of_the_whole_graph(rt: nx.CudaRuntime, step: Step) -> None:
    """The graph that executables are made from is brought up to date first."""
    step.graph.rebind(scalars={(0, "factor"): 3.0})
    with rt._driver.fail_call(error=REFUSED, call=SET):
        step.graph.rebind({step.x: full(rt, 5)})
    assert step.run() == 16


@pytest.mark.parametrize("n", [1, 2])
def test_a_refused_update_names_the_node_and_leaves_the_graph_as_it_was(rt: nx.CudaRuntime, step: Step, n: int) -> None:
    """Whichever of the two nodes it is, and with no error left behind."""
    z = full(rt, 0)
    driver = rt._driver
    with (
        driver.fail_call(n, error=REFUSED, call=SET),
        driver.fail_call(error="CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", call="graph_exec_update"),
        pytest.raises(nx.GraphError, match=rf"node {n - 1} \(.*NOT_SUPPORTED.*UPDATE_FAILURE") as refused,
    ):
        step.graph.rebind({step.y: z})
    assert isinstance(refused.value.__cause__, nx.DriverError)
    assert step.run() == 3
    assert (z.owner.pins, step.y.owner.pins) == ([], ["step"])
    step.graph.rebind({step.y: z})
    assert step.run(z) == 3


def test_a_graph_whose_update_can_neither_be_finished_nor_undone_replays_no_more(
    rt: nx.CudaRuntime, step: Step
) -> None:
    driver = rt._driver
    with (
        driver.fail_call(2, error=REFUSED, call=SET),
        driver.fail_call(3, error=REFUSED, call=SET),
        driver.fail_call(error=REFUSED, call="graph_exec_update"),
        pytest.raises(nx.GraphError, match="undoing it failed"),
    ):
        step.graph.rebind({step.y: full(rt, 0)})
    for attempt in (step.graph.replay, lambda: step.graph.replay_segment(0), lambda: step.graph.rebind({})):
        with pytest.raises(nx.GraphError, match="half-way and could not be undone; capture it again"):
            attempt()
    step.graph.close()
    assert step.y.owner.pins == []


class Rebound:
    """Graphs with every kind of node in two segments, and what they are rebound to."""

    def __init__(self, driver: HostDriver) -> None:
        self.rt = rt = open_on(driver)
        self.step = Step(rt)
        self.other = full(rt, 0)
        with rt.capture(into=self.step.graph):
            rt.copy(self.other, self.step.y)
            rt.fill_zero(self.step.y)
        self.x, self.y = full(rt, 5), full(rt, 0)
        rt.synchronize()

    def rebind(self) -> None:
        self.step.graph.rebind({self.step.x: self.x, self.step.y: self.y}, scalars={("scale", "factor"): 3.0})

    def run(self) -> float:
        self.step.graph.replay()
        return float(self.other.numpy()[0])


SETS = (SET, "graph_exec_memcpy_node_set_params", "graph_exec_memset_node_set_params")


def test_each_driver_call_of_a_rebind_refused_once() -> None:
    """An error and the old graph, or the new one; the same call then works."""
    for driver, on, raised in each_call_failing(REFUSED, Rebound, Rebound.rebind, spared=SETS):
        assert on.run() == (16 if raised is None else 3)
        if raised is not None:
            on.rebind()
            assert on.run() == 16
        on.rt.close()
        assert not driver.live(), str(driver.live())


def test_each_driver_call_of_a_rebind_and_of_its_fallback_refused_once() -> None:
    for driver, on, raised in each_call_failing(REFUSED, Rebound, refuse_node_and_rebind, spared=SETS):
        on.step.graph.replay()
        assert on.other.numpy()[0] == (16 if raised is None else 3)
        on.rt.close()
        assert not driver.live(), str(driver.live())


def refuse_node_and_rebind(on: Rebound) -> None:
    with on.rt._driver.fail_call(error="CUDA_ERROR_NOT_PERMITTED", call=SETS[1]):
        on.rebind()


def test_a_fault_in_a_rebind_poisons_the_runtime() -> None:
    for _, on, raised in each_call_failing("CUDA_ERROR_ILLEGAL_ADDRESS", Rebound, Rebound.rebind):
        if raised is not None:
            assert isinstance(raised, nx.DeviceFaultError)
            with pytest.raises(nx.DeviceFaultError):
                on.step.graph.replay()
        on.rt.close()


def test_a_fault_of_the_device_is_not_taken_for_a_refusal(rt: nx.CudaRuntime, step: Step) -> None:
    rt.launch(FAULT.prepare(rt, 1, 8))
    with pytest.raises(nx.DeviceFaultError):
        rt.synchronize()
    with pytest.raises(nx.DeviceFaultError):
        step.graph.rebind({step.x: step.y})


def test_rebinding_leaks_nothing(rt: nx.CudaRuntime, step: Step) -> None:
    """Thousands of times, with new memory each time."""
    before = rt._driver.live()
    live = rt.stats().live_bytes
    current = step.x
    for value in range(2000):
        new = full(rt, value)
        step.graph.rebind({current: new})
        step.graph.replay()
        current = new
    assert step.y.numpy()[0] == 2 * 1999 + 1
    assert rt.stats().live_bytes - live <= 4096
    assert rt._driver.live().graph_execs == before.graph_execs


def test_numbers_that_an_operator_has_checked_stay(rt: nx.CudaRuntime) -> None:
    """Sizes reach the device as addresses do; the scale of the strict selection may change."""
    shapes = ((1, 2, 1, 4), (1, 5, 4), (1, 2, 1), (1, 1, 2, 5))
    inputs, selected = [rt.zeros(shape, nx.float32) for shape in shapes], rt.empty((1, 1, 2, 3), nx.int64)
    kernel = nx.create_kernel(rt, nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 3, "scale": 1.0}))
    kernel.execute(inputs, [selected])
    with rt.capture([kernel]) as graph:
        kernel.execute(inputs, [selected])
    with pytest.raises(nx.GraphError, match="'key_seq' of dsa_index_select_score belongs to what its operator"):
        graph.rebind(scalars={("dsa_index_select_score", "key_seq"): 6})
    graph.rebind(scalars={("dsa_index_select_score", "scale"): 2.0})
    graph.replay()
    assert selected.numpy().tolist() == [[[[0, 1, 2]] * 2]]
