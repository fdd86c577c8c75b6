"""The runtime on a GPU: the host driver's tests once more, and what only a GPU can show."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.base import CaptureStatus
from nxrt_cuda.stats import WorkspaceLedger
from nxrt_cuda.workspace import Workspace
from tests import test_graph, test_launch, test_memory, test_runtime, test_tensor, test_threads, test_transfer
from tests.small_kernels import ADD_ONE, MIXED, SCALE, SLOW, Background, on_thread

ROOT = Path(__file__).parent.parent.parent


pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("context_stays")]


# As on the host driver.


@pytest.mark.parametrize(
    "behaviour",
    [
        test_launch.test_arguments_arrive_on_the_other_side_of_the_driver,
        test_launch.test_argument_storage_belongs_to_one_launch,
        test_launch.test_arguments_are_taken_when_the_launch_is_made,
        test_launch.test_more_shared_memory_than_the_device_has_is_refused_with_both_sizes,
        test_launch.test_a_launch_keeps_its_operands_alive,
        test_launch.test_a_freed_tensor_is_refused_when_prepared_and_when_launched,
        test_launch.test_another_runtime_s_tensor_is_refused,
        test_launch.test_launching_leaves_no_objects_behind,
        test_tensor.test_narrow_is_a_window_on_the_same_memory,
        test_tensor.test_strided_and_broadcast_views_are_read_element_by_element,
        test_tensor.test_bfloat16_views_are_read_too,
        test_tensor.test_copy_from_overwrites_and_casts_within_a_kind,
        test_memory.test_freed_memory_is_reused_without_the_driver,
        test_memory.test_memory_that_is_dropped_is_reused_like_memory_that_is_freed,
        test_memory.test_trimming_returns_free_memory_and_only_that,
        test_memory.test_reused_memory_is_written_after_the_work_that_was_queued_on_it,
        test_memory.test_memory_with_an_upload_under_way_can_be_freed,
        test_memory.test_a_graph_stable_address_is_nobody_else_s_while_it_is_held,
        test_memory.test_graph_stable_memory_bypasses_the_pool,
        test_memory.test_freeing_from_two_threads_at_once_is_freeing_once,
        test_memory.test_freed_memory_is_refused_everywhere,
        test_memory.test_a_view_keeps_its_memory_alive,
        test_memory.test_raw_memory_lives_until_it_is_freed,
        test_transfer.test_a_temporary_source_may_be_collected_as_soon_as_the_call_returns,
        test_transfer.test_staging_is_not_reused_while_a_copy_still_reads_it,
        test_transfer.test_a_read_sees_everything_queued_before_it_on_both_streams,
        test_transfer.test_a_pending_read_has_the_values_of_its_place_in_the_stream,
        test_transfer.test_a_pending_read_may_be_finished_by_several_threads,
        test_transfer.test_a_pending_read_outlives_its_tensor,
        test_transfer.test_asynchronous_uploads_stand_between_the_work_before_and_after,
        test_transfer.test_copy_and_fill_are_ordered_with_launches,
        test_transfer.test_asynchronous_copies_on_the_device_stand_between_the_work_before_and_after,
        test_graph.test_a_capture_records_and_runs_nothing,
        test_graph.test_each_replay_is_the_recorded_work_once_more,
        test_graph.test_copies_and_fills_are_recorded_too,
        test_graph.test_a_result_that_was_read_is_not_overwritten_by_the_next_replay,
        test_graph.test_graph_counters,
        test_graph.test_a_capture_that_recorded_nothing_is_warned_of_where_it_was_written,
        test_graph.test_a_graph_keeps_its_buffers_until_it_is_closed,
        test_graph.test_operands_of_copies_and_fills_are_kept_too,
        test_graph.test_operands_named_to_launch_are_kept,
        test_graph.test_memory_of_a_live_graph_cannot_be_freed,
        test_graph.test_raw_memory_of_a_live_graph_cannot_be_freed_either,
        test_graph.test_a_closed_graph_does_not_replay,
        test_graph.test_closing_does_not_disturb_a_replay_that_is_queued,
        test_graph.test_a_thousand_graphs_leave_nothing_behind,
        test_graph.test_another_runtime_s_work_on_this_thread_cannot_spoil_the_capture,
        test_graph.test_kernels_are_asked_before_anything_is_recorded,
        test_graph.test_segments_replay_in_the_order_of_their_capture,
        test_graph.test_the_slots_are_apart,
        test_threads.test_launches_of_many_threads_all_run,
        test_threads.test_threads_with_tensors_of_their_own_do_not_disturb_each_other,
        test_threads.test_a_hundred_captures_beside_a_thread_that_allocates_and_copies,
        test_threads.test_the_gate_opens_when_a_capture_is_aborted,
        test_threads.test_captures_of_several_threads_follow_each_other,
        test_threads.test_exclusive_keeps_other_threads_out_of_a_sequence,
        test_runtime.test_two_runtimes_do_not_mix_their_memory,
        test_runtime.test_every_call_works_from_a_fresh_thread,
        test_runtime.test_two_marks_tell_the_time_of_the_work_between_them,
        test_runtime.test_latched_codes_add_up_until_they_are_reset,
        test_runtime.test_a_replay_latches_too,
        test_runtime.test_each_operation_is_counted_once,
        test_runtime.test_compiles_are_counted_once_a_specialisation,
        test_runtime.test_other_threads_go_on_while_one_waits,
    ],
    ids=lambda behaviour: behaviour.__name__.removeprefix("test_"),
)
def test_as_on_the_host_driver(rt: nx.CudaRuntime, behaviour: Callable[[nx.CudaRuntime], None]) -> None:
    behaviour(rt)


@pytest.mark.parametrize("dtype", [nx.float32, nx.float16, nx.bfloat16, nx.int64, nx.int8, nx.bool_], ids=str)
def test_arrays_come_back_as_they_went(rt: nx.CudaRuntime, dtype: nx.DataType) -> None:
    for shape in ((), (5,), (2, 3, 4), (3, 0, 2), (1000, 1001)):
        source = (np.arange(int(np.prod(shape))) % 100).astype(dtype.numpy).reshape(shape)
        np.testing.assert_array_equal(rt.from_array(source).numpy(), source)


def test_the_source_may_change_as_soon_as_the_call_returns(rt: nx.CudaRuntime) -> None:
    """Behind a kernel that keeps the copies from running yet, and in pieces larger than a staging buffer."""
    for asynchronous in (False, True):
        x = rt.zeros((5_000_000,), nx.float32)
        source = np.arange(5_000_000, dtype=np.float32)
        rt.launch(SLOW.prepare(rt, 1, 20))
        rt.write(x, source, asynchronous=asynchronous)
        source[:] = -1
        np.testing.assert_array_equal(x.numpy(), np.arange(5_000_000, dtype=np.float32))


def test_the_device_says_what_it_allows(rt: nx.CudaRuntime) -> None:
    found = rt.capabilities
    assert found.compute_capability >= (7, 5)
    assert found.max_grid_dim_x == 2**31 - 1
    assert found.max_threads_per_block == 1024
    assert found.shared_memory_per_block_optin >= found.shared_memory_per_block == 48 * 1024
    assert found.multiprocessor_count > 1
    assert found.l2_cache_bytes > 1 << 20
    assert rt.device == "cuda:0"
    assert rt.device_name in repr(rt)


def test_a_device_that_is_not_there_is_refused_with_how_many_there_are(gpu: str) -> None:
    with pytest.raises(nx.NoDeviceError, match=r"cuda:99 of \d+"):
        nx.open_runtime("cuda:99")


# Captures.


def test_a_capture_refuses_what_would_spoil_it_and_stays_usable(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    attempts = test_graph.refused(rt)
    del attempts["dlpack"]  # which exports in place here
    with rt.capture() as graph:
        rt.launch(launch)
        for what, (operation, attempt) in attempts.items():
            with pytest.raises(nx.CaptureError) as caught:
                attempt()
            assert str(caught.value).startswith(operation), what
            assert rt.capture_status() is CaptureStatus.ACTIVE, what
        rt.launch(launch)
    assert graph.node_count == 2
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_body_ends_the_capture(rt: nx.CudaRuntime, kind: type[BaseException]) -> None:
    test_graph.test_an_error_in_the_body_ends_the_capture_and_is_what_the_caller_sees(rt, kind)


def test_a_capture_that_was_invalidated_ends_and_the_next_one_works(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.begin_graph_capture()
    rt.launch(launch)
    with rt._session.current(), pytest.raises(nx.DriverError, match=r"cuMemAlloc failed: .*\(900\)"):
        rt._driver.mem_alloc(4)
    assert rt.capture_status() is CaptureStatus.INVALIDATED
    with pytest.raises(nx.GraphError, match=r"failed at its end: cuStreamEndCapture failed: .*\(901\)"):
        rt.end_graph_capture()
    assert rt.capture_status() is CaptureStatus.NONE
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_the_first_failure_in_a_capture_is_what_its_end_reports(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    function = ADD_ONE.load(rt)
    good = ADD_ONE.prepare(rt, 4, x, 4)
    refused = nx.PreparedLaunch(function, nx.LaunchConfig((1, 1, 1), (128, 1, 1), 1 << 20), (x, 4))
    rt.begin_graph_capture()
    rt.launch(good)
    with pytest.raises(nx.DriverError, match="cuLaunchKernel failed"):
        rt.launch(refused)
    with pytest.raises(nx.GraphError, match=r"failed at add_one grid=\(1, 1, 1\) block=\(128, 1, 1\): cuLaunchKernel"):
        rt.end_graph_capture()
    assert rt.capture_status() is CaptureStatus.NONE
    rt.launch(good)
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_garbage_may_be_collected_in_a_capture(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)

    def garbage() -> None:
        with rt.capture() as old:
            rt.launch(launch)
        cycle: list[Any] = [
            rt.zeros((4,), nx.float32),
            rt.alloc_graph_stable(512),
            old,
            rt.read_async(x),
            rt.record_event(),
        ]
        cycle.append(cycle)

    gc.disable()
    try:
        garbage()
        with rt.capture() as graph:
            rt.launch(launch)
            assert gc.collect() > 0
            assert rt.capture_status() is CaptureStatus.ACTIVE
            rt.launch(launch)
    finally:
        gc.enable()
    assert graph.node_count == 2


def test_a_workspace_keeps_its_address_through_capture_and_replay(rt: nx.CudaRuntime) -> None:
    workspace = Workspace(rt, "Op", WorkspaceLedger())
    slot = workspace.candidate(16)
    workspace.publish(slot)
    launch = SCALE.prepare(rt, 4, slot.ptr, rt.from_array(np.arange(4, dtype=np.float32)), 2.0, 4)
    with rt.capture() as graph:
        rt.launch(launch)
        rt.retain(workspace.device_graph_resources())
        with pytest.raises(nx.CaptureError, match="warm the fixed shape before capture"):
            workspace.candidate(17)
    address = slot.ptr
    del slot
    workspace.publish(workspace.candidate(1 << 20))
    rt.trim_pool()
    graph.replay()
    target = np.zeros(4, np.float32)
    rt.dtoh(target, address)
    np.testing.assert_array_equal(target, [0, 2, 4, 6])


@pytest.mark.parametrize("stream", [0, 1])
def test_the_driver_s_default_streams_run_and_cannot_be_captured(gpu: str, stream: int) -> None:
    with nx.open_runtime("cuda:0", stream=stream) as runtime:
        x = runtime.zeros((4,), nx.float32)
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        np.testing.assert_array_equal(x.numpy(), np.ones(4))
        with pytest.raises(nx.CaptureError, match="is one of the driver's default streams"):
            runtime.begin_graph_capture()
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


# Contexts and threads.


def test_a_thread_with_a_private_context_gets_it_back(rt: nx.CudaRuntime) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)

    def work() -> None:
        status, private = driver.cuCtxCreate(None, 0, 0)
        assert not status

        def unchanged() -> bool:
            return int(driver.cuCtxGetCurrent()[1]) == int(private)

        try:
            rt.launch(launch)
            assert unchanged()
            with rt.capture() as graph:
                rt.launch(launch)
                assert unchanged()
            graph.replay()
            assert unchanged()
            y = rt.from_array(np.ones(1000, np.float32))
            rt.write(y, np.zeros(1000), asynchronous=True)
            assert not y.numpy().any()
            assert unchanged()
            rt.synchronize()
            graph.close()
            rt.trim_pool()
            assert unchanged()
        finally:
            driver.cuCtxDestroy(private)

    on_thread(work)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


def test_a_heartbeat_goes_on_while_the_runtime_waits(rt: nx.CudaRuntime) -> None:
    """The interpreter's lock is not held in waiting driver calls."""
    launch = SLOW.prepare(rt, 1, 200)
    for wait in (rt.synchronize, rt.check_capture_error, rt.drain_for_unmap, rt.trim_pool):
        stop = threading.Event()
        beats = 0

        def beat(stop: threading.Event = stop) -> None:
            nonlocal beats
            while not stop.wait(0.002):
                beats += 1

        rt.empty((1000,), nx.float32).free()
        rt.launch(launch)
        with Background(beat):
            try:
                wait()
            finally:
                stop.set()
        assert beats > 20, wait


def test_memory_that_is_not_there_is_refused_with_the_amounts(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.OutOfMemoryError, match=r"\d+ bytes asked for; \d+ of \d+ are free, this runtime holds \d+"):
        rt.alloc_raw(1 << 46)
    assert not rt.zeros((4,), nx.float32).numpy().any()


def test_opening_and_closing_gives_the_memory_back(rt: nx.CudaRuntime) -> None:
    def free() -> int:
        with rt._session.current():
            return rt._driver.mem_get_info()[0]

    for round_ in range(4):
        with nx.open_runtime("cuda:0") as other:
            other.zeros((64 << 20,), nx.uint8)
            other.from_array(np.zeros(1 << 20, np.float32))
        if round_ == 0:
            before = free()
    assert before - free() < 8 << 20


# PyTorch and CuPy in the same process.


def step(rt: nx.CudaRuntime) -> None:
    """Launch, capture, replay, read."""
    x = rt.zeros((1000,), nx.float32)
    launch = ADD_ONE.prepare(rt, 1000, x, 1000)
    rt.launch(launch)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.full(1000, 2))


def test_torch_before_between_and_after(gpu: str) -> None:
    """One primary context serves both; closing the last runtime does not take it from the other."""
    torch = pytest.importorskip("torch")

    def torch_step() -> None:
        a = torch.arange(1000, device="cuda", dtype=torch.float32)
        assert float((a @ a).item()) == pytest.approx(float(np.sum(np.arange(1000.0) ** 2)), rel=1e-5)

    torch_step()
    with nx.open_runtime("cuda:0") as first:
        step(first)
        torch_step()
        with nx.open_runtime("cuda:0") as second:
            step(second)
            torch_step()
            step(first)
    torch_step()
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(8, device="cuda")
    with nx.open_runtime("cuda:0") as third:
        step(third)
        with torch.cuda.graph(graph):
            static += 1
        graph.replay()
        step(third)
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 8


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_torch_tensors_come_in_and_go_out_in_place(rt: nx.CudaRuntime, name: str) -> None:
    torch = pytest.importorskip("torch")
    theirs = (torch.arange(24, device="cuda").reshape(2, 3, 4) % 2).to(getattr(torch, name))
    mine = rt.from_array(theirs)
    assert (mine.ptr, mine.shape) == (theirs.data_ptr(), (2, 3, 4))
    np.testing.assert_array_equal(mine.numpy().astype(np.float32), theirs.float().cpu().numpy())
    part = rt.from_array(theirs[:, 1:, ::2])
    np.testing.assert_array_equal(part.numpy().astype(np.float32), theirs[:, 1:, ::2].float().cpu().numpy())
    back = torch.from_dlpack(mine)
    assert (back.data_ptr(), back.dtype, tuple(back.shape)) == (theirs.data_ptr(), theirs.dtype, (2, 3, 4))


def test_torch_waits_for_our_work_and_we_for_torch_s(rt: nx.CudaRuntime) -> None:
    """On streams of their own, with a slow kernel in front so that a missing fence shows."""
    torch = pytest.importorskip("torch")
    x = rt.zeros((1 << 20,), nx.float32)
    add = ADD_ONE.prepare(rt, 1 << 20, x, 1 << 20)
    slow = SLOW.prepare(rt, 1, 30)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        rt.launch(slow)
        rt.launch(add)
        theirs = torch.from_dlpack(x) * 10
        torch.cuda._sleep(50_000_000)
        theirs += 1
        mine = rt.from_array(theirs)
        rt.launch(ADD_ONE.prepare(rt, 1 << 20, mine, 1 << 20))
        assert np.all(mine.numpy() == 12)


def test_the_runtime_runs_on_torch_s_stream(gpu: str) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    with nx.open_runtime("cuda:0", stream=stream) as runtime, torch.cuda.stream(stream):
        assert runtime.stream == stream.cuda_stream
        theirs = torch.zeros(1000, device="cuda")
        mine = runtime.from_array(theirs)
        launch = ADD_ONE.prepare(runtime, 1000, mine, 1000)
        for _ in range(10):
            theirs.mul_(2)
            runtime.launch(launch)
        with runtime.capture() as graph:
            runtime.launch(launch)
        graph.replay()
        assert theirs.tolist() == [1024.0] * 1000
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_torch_tensor_is_held_until_the_work_on_it_is_done(rt: nx.CudaRuntime) -> None:
    """Dropped while a kernel still writes it, its memory must not go to torch's next tensor."""
    torch = pytest.importorskip("torch")
    theirs = torch.zeros(1 << 20, device="cuda")
    mine = rt.from_array(theirs)
    address = theirs.data_ptr()
    slow, add_one = SLOW.prepare(rt, 1, 1), ADD_ONE.prepare(rt, 1 << 20, mine, 1 << 20)
    for launch in (slow, add_one):  # CUDA loads a kernel at its first launch, and may wait for running ones
        rt.launch(launch)
    rt.synchronize()
    slow.set(0, 1000)
    rt.launch(slow)
    rt.launch(add_one)
    del theirs, mine, add_one, launch
    gc.collect()
    rt.alloc_raw(1)
    bystander = torch.zeros(1 << 20, device="cuda")
    assert bystander.data_ptr() != address
    rt.synchronize()
    assert not bystander.any().item()


def test_a_module_is_unloaded_behind_the_work_of_its_kernel(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last launch is under way when nothing refers to the kernel any more; it runs to its end."""
    monkeypatch.setattr(rt._modules, "_kept", deque(maxlen=0))
    x = rt.zeros((4,), nx.float32)
    slow, add_one = SLOW.prepare(rt, 1, 300), ADD_ONE.prepare(rt, 4, x, 4)
    for launch in (add_one, slow, add_one):  # a first launch, which loads, may wait for running kernels
        rt.launch(launch)
    del slow, add_one, launch
    rt.alloc_raw(1)
    assert rt._modules.stats().unloaded == 0
    rt.synchronize()
    for _ in range(2):
        rt.alloc_raw(1)
    assert rt._modules.stats().unloaded == 2
    assert x.numpy().tolist() == [2] * 4


def test_exported_memory_is_kept_for_torch(rt: nx.CudaRuntime) -> None:
    torch = pytest.importorskip("torch")
    x = rt.from_array(np.arange(1000, dtype=np.float32))
    theirs = torch.from_dlpack(x)
    with pytest.raises(nx.DeviceMemoryError, match="a DLPack export"):
        x.free()
    del x
    gc.collect()
    rt.from_array(np.full(1000, -1, np.float32))
    assert theirs.sum().item() == 999 * 1000 / 2


def test_bfloat16_of_torch_in_host_memory_comes_in(rt: nx.CudaRuntime) -> None:
    torch = pytest.importorskip("torch")
    x = rt.from_array(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t())
    assert x.dtype == nx.bfloat16
    np.testing.assert_array_equal(x.numpy().astype(np.float32), np.arange(6).reshape(2, 3).T)


def test_numpy_refuses_device_memory_and_lets_go_of_it(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.arange(3, dtype=np.float32))
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(x)
    x.free()


def test_cupy_arrays_come_in_and_go_out_in_place(rt: nx.CudaRuntime) -> None:
    cupy = pytest.importorskip("cupy")
    theirs = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    for array in (theirs, OnlyTheOldProtocol(theirs)):
        mine = rt.from_array(array)
        assert mine.ptr == theirs.data.ptr
        rt.launch(ADD_ONE.prepare(rt, 12, mine, 12))
        rt.synchronize()
    cupy.testing.assert_array_equal(theirs, cupy.arange(12).reshape(3, 4) + 2)
    x = rt.from_array(np.arange(12, dtype=np.float32).reshape(3, 4))
    for taken in (cupy.from_dlpack(x), cupy.asarray(x)):
        assert taken.data.ptr == x.ptr
        cupy.testing.assert_array_equal(taken, cupy.arange(12).reshape(3, 4))
    with nx.open_runtime("cuda:0", stream=cupy.cuda.Stream(non_blocking=True)) as runtime:
        step(runtime)


class OnlyTheOldProtocol:
    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self._array = array


def test_bfloat16_goes_through_torch_bit_for_bit(rt: nx.CudaRuntime) -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = rt.from_array(bits.view(ml_dtypes.bfloat16))
    theirs = torch.from_dlpack(x).view(torch.int16).cpu().numpy()
    np.testing.assert_array_equal(theirs.view(np.uint16), bits)


# Processes of their own: faults, forks, and the end.

PRELUDE = """
import gc, os, sys
import numpy as np
import nxrt_cuda as nx
from tests.small_kernels import ADD_ONE, FAULT, SLOW

def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{call} was not refused")

rt = nx.open_runtime("cuda:0")
x = rt.zeros((4,), nx.float32)
add = ADD_ONE.prepare(rt, 4, x, 4)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # Python 3.12 warns of every fork in a process with threads, which a CUDA process has.
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_fault_poisons_the_runtime_and_names_its_suspects(gpu: str) -> None:
    done = run(
        """
        rt.launch(add)
        rt.synchronize()
        rt.launch(FAULT.prepare(rt, 1, 0x10))
        first = refused(nx.DeviceFaultError, x.numpy)
        assert (first.code, first.name) == (700, "CUDA_ERROR_ILLEGAL_ADDRESS"), first
        assert first.suspects == ("fault grid=(1, 1, 1) block=(128, 1, 1)",), first.suspects
        assert "restart the process" in str(first)
        for call in (rt.synchronize, x.numpy, lambda: rt.launch(add), lambda: rt.alloc_raw(4), rt.begin_graph_capture):
            assert str(refused(nx.DeviceFaultError, call)) == str(first)
        rt.close()
        refused(nx.DeviceFaultError, lambda: nx.open_runtime("cuda:0"))
        """
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_in_a_replay_names_the_replay(gpu: str) -> None:
    done = run(
        """
        bad = FAULT.prepare(rt, 1, 0x10)
        with rt.capture(name="decoder") as graph:
            rt.launch(bad)
        graph.replay()
        assert refused(nx.DeviceFaultError, rt.synchronize).suspects == ("replay of decoder",)
        """
    )
    assert done.returncode == 0, done.stderr


def test_eager_sync_makes_the_launch_itself_raise(gpu: str) -> None:
    done = run(
        """
        eager = nx.open_runtime("cuda:0", eager_sync=True)
        y = eager.zeros((4,), nx.float32)
        eager.launch(ADD_ONE.prepare(eager, 4, y, 4))
        error = refused(nx.DeviceFaultError, lambda: eager.launch(FAULT.prepare(eager, 1, 0x10)))
        assert error.suspects == ("fault grid=(1, 1, 1) block=(128, 1, 1)",), error.suspects
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_is_told_to_spawn_and_the_parent_goes_on(gpu: str) -> None:
    done = run(
        """
        with rt.capture() as graph:
            rt.launch(add)
        child = os.fork()
        if child == 0:
            for call in (rt.synchronize, x.numpy, graph.replay, lambda: rt.launch(add),
                         lambda: nx.open_runtime("cuda:0"), nx.open_runtime):
                assert "'spawn'" in str(refused(nx.RuntimeStateError, call))
            del graph, add, x
            gc.collect()
            rt.close()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        graph.replay()
        assert x.numpy().tolist() == [1] * 4
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "script",
    [
        "rt.launch(SLOW.prepare(rt, 1, 50)); rt.launch(add)",
        "rt.begin_graph_capture(); rt.launch(add)",
        "cycle = [rt, x, rt.read_async(x), rt.record_event(), x.__dlpack__()]; cycle.append(cycle); del cycle, x, rt",
        "from cuda.core import Device; Device(0).set_current(); others = [nx.open_runtime('cuda:0') for _ in range(3)]",
    ],
    ids=["queued work", "open capture", "cycles", "beside cuda.core"],
)
def test_the_interpreter_ends_quietly(gpu: str, script: str) -> None:
    done = run(script)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_spawned_child_opens_the_gpu_itself(gpu: str) -> None:
    done = run(
        """
        import multiprocessing

        from tests.gpu.test_runtime_gpu import in_a_spawned_child

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            child = context.Process(target=in_a_spawned_child)
            child.start()
            child.join()
            assert child.exitcode == 0
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def in_a_spawned_child() -> None:
    with nx.open_runtime("cuda:0") as runtime:
        step(runtime)
        out = runtime.zeros((6,), nx.float64)
        runtime.launch(MIXED.prepare(runtime, 1, out, 1, 2, 3.0, 4, 5, 6.0))
        np.testing.assert_array_equal(out.numpy(), [1, 2, 3, 4, 5, 6])
