"""Rebinding on a GPU: the host driver's tests once more, and what only a GPU can show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.errors import DriverError
from tests import test_rebind
from tests.small_kernels import ADD_ONE, SCALE, SLOW
from tests.test_rebind import Step, full

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("context_stays")]


@pytest.mark.parametrize(
    "behaviour",
    [
        test_rebind.test_a_replay_uses_the_new_tensor,
        test_rebind.test_a_tensor_is_replaced_wherever_it_occurs,
        test_rebind.test_rebinding_a_hundred_times_is_seen_by_the_very_next_replay,
        test_rebind.test_a_replay_under_way_keeps_what_it_had,
        test_rebind.test_every_segment_is_rebound,
        test_rebind.test_kernel_objects_launch_as_before_whatever_a_graph_was_rebound_to,
        test_rebind.test_numbers_are_changed_by_index_or_by_entry,
        test_rebind.test_pins_move_from_the_old_memory_to_the_new,
        test_rebind.test_memory_that_only_the_graph_held_is_given_back_in_stream_order,
        test_rebind.test_the_graph_keeps_the_new_memory_alive,
    ],
    ids=lambda behaviour: behaviour.__name__.removeprefix("test_"),
)
def test_as_on_the_host_driver(rt: nx.CudaRuntime, behaviour: Callable[[nx.CudaRuntime, Step], None]) -> None:
    behaviour(rt, Step(rt))


@pytest.mark.parametrize(
    "behaviour",
    [
        test_rebind.test_pairs_are_replaced_at_once,
        test_rebind.test_parts_of_a_tensor_move_with_it,
        test_rebind.test_copies_and_fills_are_rebound,
        test_rebind.test_operators_are_rebound,
        test_rebind.test_memory_with_two_users_stays_pinned_until_both_have_left,
        test_rebind.test_an_alignment_that_was_not_there_before_is_not_asked_for,
    ],
    ids=lambda behaviour: behaviour.__name__.removeprefix("test_"),
)
def test_without_a_graph_made_before_as_on_the_host_driver(
    rt: nx.CudaRuntime, behaviour: Callable[[nx.CudaRuntime], None]
) -> None:
    behaviour(rt)


@pytest.mark.parametrize("call", ["kernel", "memcpy", "memset"])
def test_the_whole_graph_is_updated_where_the_driver_refuses_a_node(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """By CUDA's own update of an executable from the graph that it was made from, for nodes of every kind."""
    a, b, c = (full(rt, value) for value in (1, 2, 3))
    launch = SCALE.prepare(rt, 4, b, a, 2.0, 4)
    with rt.capture() as graph:
        rt.launch(launch)
        rt.copy(c, b)
        rt.fill_zero(a)
    new_a, new_b, new_c = (full(rt, value) for value in (5, 0, 0))

    def refuse(*arguments: object) -> None:
        raise DriverError("cuGraphExecNodeSetParams", 801, "CUDA_ERROR_NOT_SUPPORTED", "refused", "by the test")

    monkeypatch.setattr(rt._driver, f"graph_exec_{call}_node_set_params", refuse)
    graph.rebind({a: new_a, b: new_b, c: new_c})
    graph.replay()
    assert [int(tensor.numpy()[0]) for tensor in (a, b, c, new_a, new_b, new_c)] == [1, 2, 3, 0, 10, 10]


def test_a_topology_that_differs_is_refused_with_the_driver_s_reason(rt: nx.CudaRuntime) -> None:
    x = full(rt, 0)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    graphs = []
    for launches in (1, 2):
        with rt.capture() as graph:
            for _ in range(launches):
                rt.launch(launch)
        graphs.append(graph)
    one, two = (graph._segments[0] for graph in graphs)
    with (
        rt._session.driving("test") as driver,
        pytest.raises(DriverError, match=r"UPDATE_FAILURE.*TOPOLOGY_CHANGED") as refused,
    ):
        driver.graph_exec_update(one.executable, two.graph)
    assert refused.value.code == 910
    graphs[0].replay()
    assert x.numpy()[0] == 1


def test_a_rebind_does_not_wait_for_the_replay_under_way(rt: nx.CudaRuntime) -> None:
    """Behind a kernel that keeps the device busy, the host goes on; each replay has its own tensors."""
    step = Step(rt)
    others = [full(rt, value) for value in (5, 6)]
    outputs = [full(rt, 0) for _ in range(3)]
    step.graph.rebind({step.y: outputs[0]})
    rt.synchronize()
    start = rt.record_event()
    rt.launch(SLOW.prepare(rt, 1, 200))
    blocker = rt.record_event()
    step.graph.replay()
    step.graph.rebind({step.x: others[0], outputs[0]: outputs[1]})
    step.graph.replay()
    step.graph.rebind({others[0]: others[1], outputs[1]: outputs[2]})
    step.graph.replay()
    with rt._session.driving("test") as driver:
        assert not driver.event_query(blocker._handle), "the host has waited for the device"
    assert start.elapsed_time(blocker) > 100
    assert [int(tensor.numpy()[0]) for tensor in outputs] == [3, 11, 13]


def test_ten_thousand_rebinds_leak_no_device_memory(rt: nx.CudaRuntime) -> None:
    step = Step(rt)
    tensors = [full(rt, value) for value in range(4)]
    step.graph.rebind({step.x: tensors[-1]})
    step.run()
    with rt._session.driving("test") as driver:
        free = driver.mem_get_info()[0]
    for count in range(10_000):
        step.graph.rebind({tensors[count % 4 - 1]: tensors[count % 4]})
        step.graph.replay()
    assert step.y.numpy()[0] == 2 * 3 + 1
    with rt._session.driving("test") as driver:
        assert driver.mem_get_info()[0] == free


def test_a_decode_step_follows_its_cache_without_recapture(rt: nx.CudaRuntime) -> None:
    """Query and output of every step in memory of their own, over the rows of one tensor."""
    rows = rt.from_array(np.arange(64 * 64, dtype=np.float32).reshape(64, 64))
    results = rt.zeros((64, 64), nx.float32)
    x, y = rows.narrow(0, 0, 1), results.narrow(0, 0, 1)
    launch = SCALE.prepare(rt, 64, y, x, 3.0, 64)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    for row in range(1, 64):
        next_x, next_y = rows.narrow(0, row, 1), results.narrow(0, row, 1)
        graph.rebind({x: next_x, y: next_y})
        graph.replay()
        x, y = next_x, next_y
    np.testing.assert_array_equal(results.numpy(), 3 * rows.numpy())
    assert rt.stats().graphs_captured == 1
