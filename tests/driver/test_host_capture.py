"""The host driver's captures and graphs: what is recorded, what ends a capture, what a replay refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from nxrt_cuda.driver.base import CaptureMode, CaptureStatus
from tests.driver.host_rig import AXPY, Rig, image, in_thread, packed, refused

THREAD_LOCAL = CaptureMode.THREAD_LOCAL


@pytest.fixture
def cell(rig: Rig) -> int:
    """Four zeroed bytes on the device."""
    return rig.upload(np.zeros(4, np.uint8))


def read(rig: Rig, ptr: int) -> int:
    return int(rig.download(ptr, np.uint8, 1)[0])


def begin(rig: Rig, mode: CaptureMode = THREAD_LOCAL) -> None:
    rig.driver.stream_begin_capture(rig.stream, mode)


def end(rig: Rig) -> int:
    return rig.driver.stream_end_capture(rig.stream)


def test_captured_work_is_recorded_and_not_run(rig: Rig, cell: int) -> None:
    begin(rig)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.ACTIVE
    rig.driver.memset_d8_async(cell, 3, 1, rig.stream)
    graph = end(rig)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.NONE
    assert read(rig, cell) == 0
    graph_exec = rig.driver.graph_instantiate(graph)
    rig.driver.graph_upload(graph_exec, rig.stream)
    rig.driver.graph_launch(graph_exec, rig.stream)
    assert read(rig, cell) == 3


def test_a_graph_tells_its_node_types_in_order(rig: Rig, cell: int) -> None:
    other, function = rig.driver.mem_alloc(4), rig.function(AXPY)
    begin(rig)
    rig.driver.memset_d8_async(cell, 0, 4, rig.stream)
    rig.launch(function, AXPY, cell, cell, 1, 0.0)
    rig.driver.memcpy_dtod_async(other, cell, 4, rig.stream)
    assert rig.driver.graph_node_types(end(rig)) == ("MEMSET", "KERNEL", "MEMCPY")


def test_an_empty_graph_is_legal_and_does_nothing(rig: Rig) -> None:
    begin(rig)
    graph = end(rig)
    assert rig.driver.graph_node_types(graph) == ()
    rig.driver.graph_launch(rig.driver.graph_instantiate(graph), rig.stream)
    rig.driver.stream_synchronize(rig.stream)


def test_replays_read_current_memory_with_the_arguments_of_the_capture(rig: Rig) -> None:
    x, y = rig.upload(np.ones(2, np.float32)), rig.upload(np.zeros(2, np.float32))
    function = rig.function(AXPY)
    begin(rig)
    rig.launch(function, AXPY, x, y, 2, 10.0)
    graph_exec = rig.driver.graph_instantiate(end(rig))
    rig.driver.graph_launch(graph_exec, rig.stream)
    assert rig.download(y, np.float32, 2).tolist() == [10, 10]
    five = np.full(2, 5, np.float32)
    rig.driver.memcpy_htod_async(x, five.ctypes.data, 8, rig.stream)
    rig.driver.graph_launch(graph_exec, rig.stream)
    rig.driver.graph_launch(graph_exec, rig.stream)
    assert rig.download(y, np.float32, 2).tolist() == [110, 110]


def test_a_replay_is_ordered_in_its_stream(rig: Rig, cell: int) -> None:
    """It comes after what was queued before it, and is lazy like everything else."""
    begin(rig)
    rig.driver.memset_d8_async(cell, 1, 1, rig.stream)
    graph_exec = rig.driver.graph_instantiate(end(rig))
    other = rig.driver.stream_create()
    rig.driver.memset_d8_async(cell, 9, 1, rig.stream)
    rig.driver.graph_launch(graph_exec, rig.stream)
    assert rig.download(cell, np.uint8, 1, stream=other)[0] == 0
    assert read(rig, cell) == 1


def test_a_captured_upload_reads_its_host_source_at_every_replay(rig: Rig, cell: int) -> None:
    """The graph keeps the address of the source, not its bytes."""
    source = np.array([1], np.uint8)
    begin(rig)
    rig.driver.memcpy_htod_async(cell, source.ctypes.data, 1, rig.stream)
    graph_exec = rig.driver.graph_instantiate(end(rig))
    for value in (7, 8):
        source[0] = value
        rig.driver.graph_launch(graph_exec, rig.stream)
        assert read(rig, cell) == value


def test_an_executable_graph_outlives_its_graph(rig: Rig, cell: int) -> None:
    begin(rig)
    rig.driver.memset_d8_async(cell, 6, 1, rig.stream)
    graph = end(rig)
    graph_exec = rig.driver.graph_instantiate(graph)
    rig.driver.graph_destroy(graph)
    rig.driver.graph_launch(graph_exec, rig.stream)
    rig.driver.graph_exec_destroy(graph_exec)
    assert read(rig, cell) == 6
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{graph:x} is no live graph"):
        rig.driver.graph_instantiate(graph)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{graph_exec:x} is no live executable graph"):
        rig.driver.graph_launch(graph_exec, rig.stream)


# Fork and join


def test_a_stream_that_waits_for_a_captured_event_joins_the_capture(rig: Rig, cell: int) -> None:
    """Its work becomes nodes too; it leaves the capture when that ends."""
    other, fork, join = rig.driver.stream_create(), rig.driver.event_create(False), rig.driver.event_create(False)
    begin(rig)
    rig.driver.memset_d8_async(cell, 1, 1, rig.stream)
    rig.driver.event_record(fork, rig.stream)
    rig.driver.stream_wait_event(other, fork)
    assert rig.driver.stream_capture_status(other) is CaptureStatus.ACTIVE
    rig.driver.memset_d8_async(cell, 2, 1, other)
    rig.driver.event_record(join, other)
    rig.driver.stream_wait_event(rig.stream, join)
    graph_exec = rig.driver.graph_instantiate(end(rig))
    assert rig.driver.stream_capture_status(other) is CaptureStatus.NONE
    rig.driver.graph_launch(graph_exec, rig.stream)
    assert read(rig, cell) == 2


def test_ending_a_capture_on_a_stream_that_joined_it_invalidates_it(rig: Rig) -> None:
    """Only the stream that it began on can end it, and finds no graph then."""
    other, fork = rig.driver.stream_create(), rig.driver.event_create(False)
    begin(rig)
    rig.driver.event_record(fork, rig.stream)
    rig.driver.stream_wait_event(other, fork)
    reason = f"cuStreamEndCapture on stream 0x{other:x}, which joined a capture that began on stream 0x{rig.stream:x}"
    with refused("CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", reason):
        rig.driver.stream_end_capture(other)
    assert rig.driver.stream_capture_status(other) is CaptureStatus.INVALIDATED
    with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", f"invalidated by: {reason}"):
        end(rig)
    assert rig.driver.stream_capture_status(other) is CaptureStatus.NONE
    assert rig.driver.live().graphs == 0


def test_a_fork_that_is_not_joined_ends_the_capture_without_a_graph(rig: Rig, cell: int) -> None:
    other, fork = rig.driver.stream_create(), rig.driver.event_create(False)
    begin(rig)
    rig.driver.event_record(fork, rig.stream)
    rig.driver.stream_wait_event(other, fork)
    rig.driver.memset_d8_async(cell, 2, 1, other)
    with refused("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", f"stream 0x{rig.stream:x} does not wait", f"0x{other:x}"):
        end(rig)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.NONE
    assert rig.driver.stream_capture_status(other) is CaptureStatus.NONE
    assert rig.driver.live().graphs == 0


def test_work_after_the_join_counts_as_unjoined(rig: Rig, cell: int) -> None:
    other, fork, join = rig.driver.stream_create(), rig.driver.event_create(False), rig.driver.event_create(False)
    begin(rig)
    rig.driver.event_record(fork, rig.stream)
    rig.driver.stream_wait_event(other, fork)
    rig.driver.memset_d8_async(cell, 2, 1, other)
    rig.driver.event_record(join, other)
    rig.driver.stream_wait_event(rig.stream, join)
    rig.driver.memset_d8_async(cell, 3, 1, other)
    with refused("CUDA_ERROR_STREAM_CAPTURE_UNJOINED"):
        end(rig)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_missing_fence_inside_a_capture_shows_at_the_replay(rig: Rig, cell: int, fenced: bool) -> None:
    """Nodes that nothing orders run latest first, so a reader that does not wait for its writer reads old data."""
    out, other = rig.driver.mem_alloc(1), rig.driver.stream_create()
    fork, written, join = (rig.driver.event_create(False) for _ in range(3))
    begin(rig)
    rig.driver.event_record(fork, rig.stream)
    rig.driver.stream_wait_event(other, fork)
    rig.driver.memset_d8_async(cell, 5, 1, rig.stream)
    if fenced:
        rig.driver.event_record(written, rig.stream)
        rig.driver.stream_wait_event(other, written)
    rig.driver.memcpy_dtod_async(out, cell, 1, other)
    rig.driver.event_record(join, other)
    rig.driver.stream_wait_event(rig.stream, join)
    rig.driver.graph_launch(rig.driver.graph_instantiate(end(rig)), rig.stream)
    assert read(rig, out) == (5 if fenced else 0)


def test_unordered_branches_run_latest_first_and_ordered_work_in_order() -> None:
    """Two branches between a first and a last node: each keeps its own order, and the newer goes first."""
    ran: list[int] = []
    note = image("note", ("n", "i32"))
    rig = Rig({"note": lambda launch: ran.append(launch.args["n"])})
    function, branches = rig.function(note), (rig.driver.stream_create(), rig.driver.stream_create())
    event = rig.driver.event_create(timing=False)
    begin(rig)
    rig.launch(function, note, 0)
    rig.driver.event_record(event, rig.stream)
    for branch in branches:
        rig.driver.stream_wait_event(branch, event)
    for n in (1, 2, 3, 4):
        rig.launch(function, note, n, stream=branches[n % 2])
    for branch in branches:
        rig.driver.event_record(event, branch)
        rig.driver.stream_wait_event(rig.stream, event)
    rig.launch(function, note, 5)
    rig.driver.graph_launch(rig.driver.graph_instantiate(end(rig)), rig.stream)
    rig.driver.stream_synchronize(rig.stream)
    assert ran == [0, 2, 4, 1, 3, 5]


def test_a_capturing_stream_cannot_wait_for_work_outside(rig: Rig) -> None:
    other, event = rig.driver.stream_create(), rig.driver.event_create(False)
    rig.driver.event_record(event, other)
    begin(rig)
    with refused("CUDA_ERROR_STREAM_CAPTURE_ISOLATION", f"event 0x{event:x}, recorded outside the capture"):
        rig.driver.stream_wait_event(rig.stream, event)
    with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "recorded outside the capture"):
        end(rig)


def test_two_captures_cannot_merge(rig: Rig) -> None:
    """The attempt invalidates both."""
    other, event = rig.driver.stream_create(), rig.driver.event_create(False)
    begin(rig)
    rig.driver.stream_begin_capture(other, THREAD_LOCAL)
    rig.driver.event_record(event, rig.stream)
    with refused("CUDA_ERROR_STREAM_CAPTURE_MERGE", "event of another capture"):
        rig.driver.stream_wait_event(other, event)
    for stream in (rig.stream, other):
        with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            rig.driver.stream_end_capture(stream)


def test_an_event_of_an_ended_capture_serves_nobody_until_it_is_recorded_again(rig: Rig) -> None:
    event = rig.driver.event_create(timing=True)
    begin(rig)
    rig.driver.event_record(event, rig.stream)
    end(rig)
    for call in (
        lambda: rig.driver.stream_wait_event(rig.stream, event),
        lambda: rig.driver.event_query(event),
        lambda: rig.driver.event_synchronize(event),
        lambda: rig.driver.event_elapsed_time(event, event),
    ):
        with refused("CUDA_ERROR_INVALID_VALUE", "for an event last recorded in a capture that has ended"):
            call()
    rig.driver.event_record(event, rig.stream)
    rig.driver.event_synchronize(event)


def test_waiting_in_a_capture_for_an_event_of_an_ended_one_spoils_it(rig: Rig) -> None:
    event = rig.driver.event_create(timing=False)
    begin(rig)
    rig.driver.event_record(event, rig.stream)
    end(rig)
    begin(rig)
    with refused("CUDA_ERROR_INVALID_VALUE", "a capture that has ended"):
        rig.driver.stream_wait_event(rig.stream, event)
    with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        end(rig)


def test_timing_a_captured_event_is_refused_and_spoils_nothing(rig: Rig) -> None:
    event = rig.driver.event_create(timing=True)
    begin(rig)
    rig.driver.event_record(event, rig.stream)
    with refused("CUDA_ERROR_CAPTURED_EVENT", "was last recorded in a capture"):
        rig.driver.event_elapsed_time(event, event)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.ACTIVE
    end(rig)


# What is illegal in a capture


class FurnishedRig(Rig):
    """A rig with one object of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.ptr, self.pinned = self.driver.mem_alloc(4), self.driver.mem_host_alloc(4)
        self.module = self.driver.module_load(AXPY.encode())
        self.other, self.event = self.driver.stream_create(), self.driver.event_create(timing=True)
        begin(self)
        self.graph = end(self)
        self.graph_exec = self.driver.graph_instantiate(self.graph)
        self.driver.event_record(self.event, self.stream)
        self.driver.event_synchronize(self.event)


UNSAFE: dict[str, Callable[[FurnishedRig], object]] = {
    "mem_alloc": lambda rig: rig.driver.mem_alloc(4),
    "mem_free": lambda rig: rig.driver.mem_free(rig.ptr),
    "mem_host_alloc": lambda rig: rig.driver.mem_host_alloc(4),
    "mem_host_free": lambda rig: rig.driver.mem_host_free(rig.pinned),
    "module_load": lambda rig: rig.driver.module_load(AXPY.encode()),
    "module_unload": lambda rig: rig.driver.module_unload(rig.module),
    "stream_synchronize": lambda rig: rig.driver.stream_synchronize(rig.other),
    "stream_query": lambda rig: rig.driver.stream_query(rig.other),
    "event_query": lambda rig: rig.driver.event_query(rig.event),
    "event_synchronize": lambda rig: rig.driver.event_synchronize(rig.event),
    "graph_instantiate": lambda rig: rig.driver.graph_instantiate(rig.graph),
    "graph_exec_destroy": lambda rig: rig.driver.graph_exec_destroy(rig.graph_exec),
    "primary_ctx_release": lambda rig: rig.driver.primary_ctx_release(0),
}

HARMLESS: dict[str, Callable[[FurnishedRig], object]] = {
    "mem_get_info": lambda rig: rig.driver.mem_get_info(),
    "stream_create": lambda rig: rig.driver.stream_create(),
    "stream_destroy": lambda rig: rig.driver.stream_destroy(rig.other),
    "event_create": lambda rig: rig.driver.event_create(timing=False),
    "event_destroy": lambda rig: rig.driver.event_destroy(rig.event),
    "event_record": lambda rig: rig.driver.event_record(rig.event, rig.other),
    "event_elapsed_time": lambda rig: rig.driver.event_elapsed_time(rig.event, rig.event),
    "memset_d8_async": lambda rig: rig.driver.memset_d8_async(rig.ptr, 0, 4, rig.other),
    "graph_destroy": lambda rig: rig.driver.graph_destroy(rig.graph),
    "graph_upload": lambda rig: rig.driver.graph_upload(rig.graph_exec, rig.other),
    "graph_launch": lambda rig: rig.driver.graph_launch(rig.graph_exec, rig.other),
    "stream_wait_event": lambda rig: rig.driver.stream_wait_event(rig.stream, rig.driver.event_create(timing=False)),
}
"""Calls beside the capture; the last one waits, in it, for an event that was never recorded."""


@pytest.fixture
def furnished() -> FurnishedRig:
    return FurnishedRig()


@pytest.mark.parametrize("call", UNSAFE)
def test_an_unsafe_call_is_refused_and_invalidates_the_capture(furnished: FurnishedRig, call: str) -> None:
    """The capture ends without a graph and says which call it was; nothing else has changed."""
    rig, before = furnished, furnished.driver.live()
    begin(rig)
    with refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "on thread MainThread invalidates the capture"):
        UNSAFE[call](rig)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.INVALIDATED
    with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "invalidated by: cu"):
        rig.driver.memset_d8_async(rig.ptr, 0, 4, rig.stream)
    with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "invalidated by: cu"):
        end(rig)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.NONE
    assert rig.driver.live() == before
    UNSAFE[call](rig)


@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("call", HARMLESS)
def test_a_harmless_call_leaves_no_trace_in_the_capture(furnished: FurnishedRig, call: str, mode: CaptureMode) -> None:
    begin(furnished, mode)
    HARMLESS[call](furnished)
    assert furnished.driver.stream_capture_status(furnished.stream) is CaptureStatus.ACTIVE
    assert furnished.driver.graph_node_types(end(furnished)) == ()


def test_destroying_another_stream_in_a_capture_completes_its_work(furnished: FurnishedRig) -> None:
    furnished.driver.memset_d8_async(furnished.ptr, 5, 4, furnished.other)
    begin(furnished)
    furnished.driver.stream_destroy(furnished.other)
    end(furnished)
    assert read(furnished, furnished.ptr) == 5


@pytest.mark.parametrize("call", ["mem_alloc", "event_query", "stream_synchronize"])
@pytest.mark.parametrize(
    ("capture", "thread", "legal"),
    [
        (CaptureMode.THREAD_LOCAL, CaptureMode.GLOBAL, True),
        (CaptureMode.GLOBAL, CaptureMode.GLOBAL, False),
        (CaptureMode.GLOBAL, CaptureMode.THREAD_LOCAL, True),
        (CaptureMode.GLOBAL, CaptureMode.RELAXED, True),
        (CaptureMode.RELAXED, CaptureMode.GLOBAL, True),
    ],
    ids=lambda value: value.name if isinstance(value, CaptureMode) else None,
)
def test_unsafe_calls_of_other_threads(
    furnished: FurnishedRig, call: str, capture: CaptureMode, thread: CaptureMode, legal: bool
) -> None:
    """They invalidate a global capture, unless that thread has changed its own mode."""
    rig = furnished
    begin(rig, capture)

    def elsewhere() -> None:
        rig.driver.ctx_push_current(rig.context)
        assert rig.driver.thread_exchange_capture_mode(thread) is CaptureMode.GLOBAL
        if legal:
            UNSAFE[call](rig)
        else:
            with refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "on thread other"):
                UNSAFE[call](rig)

    in_thread(elsewhere)
    if legal:
        end(rig)
    else:
        with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "on thread other"):
            end(rig)


@pytest.mark.parametrize("relax", ["capture", "thread"])
def test_relaxed_captures_and_threads_may_allocate(rig: Rig, relax: str) -> None:
    if relax == "thread":
        rig.driver.thread_exchange_capture_mode(CaptureMode.RELAXED)
    begin(rig, CaptureMode.RELAXED if relax == "capture" else CaptureMode.GLOBAL)
    rig.driver.mem_alloc(4)
    end(rig)


CONFLICTS: dict[str, Callable[[FurnishedRig], object]] = {
    "cuStreamSynchronize on": lambda rig: rig.driver.stream_synchronize(rig.stream),
    "cuStreamQuery on": lambda rig: rig.driver.stream_query(rig.stream),
    "cuStreamDestroy on capturing stream": lambda rig: rig.driver.stream_destroy(rig.stream),
    "cuGraphLaunch on capturing stream": lambda rig: rig.driver.graph_launch(rig.graph_exec, rig.stream),
    "cuGraphUpload on capturing stream": lambda rig: rig.driver.graph_upload(rig.graph_exec, rig.stream),
    "cuEventQuery of event": lambda rig: rig.driver.event_query(rig.event),
    "cuEventSynchronize of event": lambda rig: rig.driver.event_synchronize(rig.event),
}
"""By how the reason begins; the event is one recorded in the capture."""


@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("reason", CONFLICTS)
def test_what_conflicts_with_the_capture_itself_is_refused_in_every_mode(
    furnished: FurnishedRig, reason: str, mode: CaptureMode
) -> None:
    rig = furnished
    begin(rig, mode)
    rig.driver.event_record(rig.event, rig.stream)
    status = "CUDA_ERROR_CAPTURED_EVENT" if "Event" in reason else "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    with refused(status, reason):
        CONFLICTS[reason](rig)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.INVALIDATED
    with refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", f"invalidated by: {reason}"):
        end(rig)


def test_the_legacy_stream_cannot_be_captured(rig: Rig) -> None:
    for stream in (0, 1):
        with refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "legacy"):
            rig.driver.stream_begin_capture(stream, THREAD_LOCAL)


def test_begin_and_end_come_in_pairs(rig: Rig) -> None:
    with refused("CUDA_ERROR_ILLEGAL_STATE", "is not capturing"):
        end(rig)
    begin(rig)
    with refused("CUDA_ERROR_ILLEGAL_STATE", "is capturing already"):
        begin(rig)
    end(rig)


def test_a_capture_ends_on_the_thread_that_began_it(rig: Rig) -> None:
    """The attempt of another thread loses the capture; a relaxed one may end anywhere."""
    begin(rig)

    def elsewhere() -> None:
        rig.driver.ctx_push_current(rig.context)
        with refused("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "began on thread MainThread"):
            end(rig)

    in_thread(elsewhere)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.NONE
    with refused("CUDA_ERROR_ILLEGAL_STATE", "is not capturing"):
        end(rig)
    begin(rig, CaptureMode.RELAXED)
    in_thread(lambda: (rig.driver.ctx_push_current(rig.context), end(rig)))


def test_invalid_work_in_a_capture_is_refused_and_records_nothing(rig: Rig) -> None:
    """The capture goes on. Of a bad address a GPU says nothing before the replay."""
    function = rig.function(AXPY)
    begin(rig)
    with refused("CUDA_ERROR_INVALID_VALUE", "grid x = 0 is outside"):
        rig.launch(function, AXPY, 0, 0, 0, 0.0, grid=(0, 1, 1))
    with refused("CUDA_ERROR_INVALID_VALUE", "8 bytes at 0x10, which is no device address"):
        rig.driver.memset_d8_async(0x10, 0, 8, rig.stream)
    assert rig.driver.stream_capture_status(rig.stream) is CaptureStatus.ACTIVE
    assert rig.driver.graph_node_types(end(rig)) == ()


# What a replay refuses


@pytest.mark.parametrize("node", ["kernel", "memset", "source", "destination", "pinned", "module"])
def test_a_replay_of_what_is_gone_is_refused(furnished: FurnishedRig, node: str) -> None:
    """The message names the node and the operand. Nothing is queued, and the context lives on."""
    rig = furnished
    function = rig.driver.module_get_function(rig.module, "axpy")
    kept = rig.upload(np.zeros(4, np.uint8))
    record, release, text = {
        "kernel": (
            lambda: rig.launch(function, AXPY, kept, rig.ptr, 1, 0.0),
            lambda: rig.driver.mem_free(rig.ptr),
            f"node 1 (kernel 'axpy' <<<(1, 1, 1), (32, 1, 1)>>>): argument 'y' = 0x{rig.ptr:x} in allocation #0",
        ),
        "memset": (
            lambda: rig.driver.memset_d8_async(rig.ptr, 0, 4, rig.stream),
            lambda: rig.driver.mem_free(rig.ptr),
            f"node 1 (memset of 4 bytes at device 0x{rig.ptr:x}): destination in allocation #0",
        ),
        "source": (
            lambda: rig.driver.memcpy_dtod_async(kept, rig.ptr, 4, rig.stream),
            lambda: rig.driver.mem_free(rig.ptr),
            "source in allocation #0",
        ),
        "destination": (
            lambda: rig.driver.memcpy_dtod_async(rig.ptr, kept, 4, rig.stream),
            lambda: rig.driver.mem_free(rig.ptr),
            "destination in allocation #0",
        ),
        "pinned": (
            lambda: rig.driver.memcpy_htod_async(kept, rig.pinned, 4, rig.stream),
            lambda: rig.driver.mem_host_free(rig.pinned),
            "source in pinned memory",
        ),
        "module": (
            lambda: rig.launch(function, AXPY, kept, kept, 1, 0.0),
            lambda: rig.driver.module_unload(rig.module),
            "the code of an unloaded module",
        ),
    }[node]
    begin(rig)
    rig.driver.memset_d8_async(kept, 9, 4, rig.stream)
    record()
    graph_exec = rig.driver.graph_instantiate(end(rig))
    release()
    for call in (rig.driver.graph_launch, rig.driver.graph_upload):
        with refused("CUDA_ERROR_INVALID_VALUE", "replay refers to freed memory", text):
            call(graph_exec, rig.stream)
    assert read(rig, kept) == 0


def test_memory_freed_between_launch_and_run_of_a_replay_is_a_fault(rig: Rig, cell: int) -> None:
    begin(rig)
    rig.driver.memset_d8_async(cell, 1, 1, rig.stream)
    graph_exec = rig.driver.graph_instantiate(end(rig))
    rig.driver.graph_launch(graph_exec, rig.stream)
    rig.driver.mem_free(cell)
    with refused("CUDA_ERROR_ILLEGAL_ADDRESS", "graph of 1 nodes on stream", "node 0 (memset", "was freed before"):
        rig.driver.stream_synchronize(rig.stream)


# Nodes, and new parameters for them


class Recorded:
    """A kernel, a copy and a fill in one graph, ``y += 2 x``, ``z = y``, ``y = 0``, and the executable of it."""

    def __init__(self, rig: Rig) -> None:
        self.driver = rig.driver
        self.context = rig.context
        self.x, self.y, self.z = (rig.upload(np.full(4, value, np.float32)) for value in (1, 0, 9))
        self.function = rig.function(AXPY)
        self.nodes: list[int] = []
        begin(rig)
        rig.launch(self.function, AXPY, self.x, self.y, 4, 2.0)
        self.nodes += rig.driver.stream_capture_dependencies(rig.stream)
        rig.driver.memcpy_dtod_async(self.z, self.y, 16, rig.stream)
        self.nodes += rig.driver.stream_capture_dependencies(rig.stream)
        rig.driver.memset_d8_async(self.y, 0, 16, rig.stream)
        self.nodes += rig.driver.stream_capture_dependencies(rig.stream)
        self.kernel, self.copy, self.fill = self.nodes
        self.graph = end(rig)
        self.graph_exec = rig.driver.graph_instantiate(self.graph)


@pytest.fixture
def recorded(rig: Rig) -> Recorded:
    return Recorded(rig)


def floats(rig: Rig, ptr: int) -> list[float]:
    values: list[float] = rig.download(ptr, np.float32, 4).tolist()
    return values


def test_work_just_captured_is_what_the_next_work_depends_on(rig: Rig, recorded: Recorded) -> None:
    """One node each, in a chain; outside a capture there is none."""
    kernel, copy, fill = recorded.nodes
    assert rig.driver.graph_edges(recorded.graph) == ((kernel, copy), (copy, fill))
    assert rig.driver.stream_capture_dependencies(rig.stream) == ()


def test_new_parameters_hold_for_later_launches_of_the_executable_only(rig: Rig, recorded: Recorded) -> None:
    """One that was queued before keeps what it had, and so does the graph."""
    driver, on = rig.driver, recorded
    other = rig.upload(np.full(4, 5, np.float32))
    driver.graph_launch(on.graph_exec, rig.stream)
    _storage, params = packed(AXPY, other, on.y, 4, 10.0)
    driver.graph_exec_kernel_node_set_params(on.graph_exec, on.kernel, on.function, (1, 1, 1), (32, 1, 1), 0, params)
    assert floats(rig, on.z) == [2] * 4
    driver.graph_launch(on.graph_exec, rig.stream)
    assert floats(rig, on.z) == [50] * 4
    driver.graph_launch(driver.graph_instantiate(on.graph), rig.stream)
    assert floats(rig, on.z) == [2] * 4


def test_a_cooperative_launch_remains_one(rig: Rig) -> None:
    """New parameters, of the node or of the executable, are held to what such a launch may be."""
    driver, function = rig.driver, rig.function(AXPY)
    begin(rig)
    rig.launch(function, AXPY, 0, 0, 0, 2.0, grid=(132, 1, 1), cooperative=True)
    (node,) = driver.stream_capture_dependencies(rig.stream)
    graph = end(rig)
    graph_exec = driver.graph_instantiate(graph)
    _storage, params = packed(AXPY, 0, 0, 0, 3.0)
    for grid, is_too_large in (((132, 1, 1), False), ((132 * 64 + 1, 1, 1), True)):
        launch = (function, grid, (32, 1, 1), 0, params)
        for change in (
            lambda launch=launch: driver.graph_kernel_node_set_params(node, *launch),
            lambda launch=launch: driver.graph_exec_kernel_node_set_params(graph_exec, node, *launch),
        ):
            with refused("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE") if is_too_large else nullcontext():
                change()


def test_copies_and_fills_take_new_parameters(rig: Rig, recorded: Recorded) -> None:
    driver, on = rig.driver, recorded
    target = rig.upload(np.full(4, 7, np.float32))
    driver.graph_exec_memcpy_node_set_params(on.graph_exec, on.copy, target, on.y, 8, on.context)
    driver.graph_exec_memset_node_set_params(on.graph_exec, on.fill, on.x, 0, 4, on.context)
    driver.graph_launch(on.graph_exec, rig.stream)
    assert (floats(rig, target), floats(rig, on.z)) == ([2, 2, 7, 7], [9] * 4)
    assert floats(rig, on.x) == [0, 1, 1, 1]


def test_an_update_takes_over_what_was_set_in_the_graph(rig: Rig, recorded: Recorded) -> None:
    driver, on = rig.driver, recorded
    _storage, params = packed(AXPY, on.x, on.y, 4, 3.0)
    driver.graph_kernel_node_set_params(on.kernel, on.function, (1, 1, 1), (32, 1, 1), 0, params)
    driver.graph_memset_node_set_params(on.fill, on.x, 0, 16, on.context)
    driver.graph_memcpy_node_set_params(on.copy, on.z, on.x, 16, on.context)
    driver.graph_exec_update(on.graph_exec, on.graph)
    driver.graph_launch(on.graph_exec, rig.stream)
    assert (floats(rig, on.z), floats(rig, on.y), floats(rig, on.x)) == ([1] * 4, [3] * 4, [0] * 4)


def test_an_update_from_a_graph_that_differs_is_refused_and_changes_nothing(rig: Rig, recorded: Recorded) -> None:
    """Other nodes, other dependencies, another kernel."""
    driver, on = rig.driver, recorded
    failure = "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"
    begin(rig)
    driver.memset_d8_async(on.y, 1, 4, rig.stream)
    with refused(failure, "TOPOLOGY_CHANGED: 3 nodes, and 1 in the graph given"):
        driver.graph_exec_update(on.graph_exec, end(rig))
    function = rig.function(AXPY)
    begin(rig)
    rig.launch(function, AXPY, on.x, on.y, 4, 2.0)
    driver.memcpy_dtod_async(on.z, on.y, 16, rig.stream)
    driver.memset_d8_async(on.y, 0, 16, rig.stream)
    with refused(failure, "PARAMETERS_CHANGED: node 0: another function"):
        driver.graph_exec_update(on.graph_exec, end(rig))
    driver.graph_launch(on.graph_exec, rig.stream)
    assert floats(rig, on.z) == [2] * 4


def test_parameters_that_do_not_fit_the_node_are_refused(rig: Rig, recorded: Recorded) -> None:
    """Another kind of work, another function, bad addresses and extents, another context, a node of another graph."""
    driver, on = rig.driver, recorded
    freed = driver.mem_alloc(16)
    driver.mem_free(freed)
    _storage, params = packed(AXPY, on.x, on.y, 4, 2.0)
    _freed_storage, freed_params = packed(AXPY, freed, on.y, 4, 2.0)
    launch = (on.function, (1, 1, 1), (32, 1, 1), 0, params)
    invalid = "CUDA_ERROR_INVALID_VALUE"
    with refused(invalid, "kernel 'axpy'", "in place of copy"):
        driver.graph_exec_kernel_node_set_params(on.graph_exec, on.copy, *launch)
    with refused(invalid, "another function"):
        driver.graph_exec_kernel_node_set_params(on.graph_exec, on.kernel, rig.function(AXPY), *launch[1:])
    with refused(invalid, "grid x = 0"):
        driver.graph_exec_kernel_node_set_params(on.graph_exec, on.kernel, on.function, (0, 1, 1), *launch[2:])
    with refused(invalid, "refers to freed memory: argument 'x'"):
        driver.graph_exec_kernel_node_set_params(on.graph_exec, on.kernel, *launch[:4], freed_params)
    with refused(invalid, "which was freed"):
        driver.graph_exec_memset_node_set_params(on.graph_exec, on.fill, freed, 0, 4, on.context)
    with refused(invalid, "overlap"):
        driver.graph_exec_memcpy_node_set_params(on.graph_exec, on.copy, on.y, on.y + 4, 8, on.context)
    with refused("CUDA_ERROR_INVALID_CONTEXT", "is current"):
        driver.graph_exec_memset_node_set_params(on.graph_exec, on.fill, on.y, 0, 4, 1)
    other = Recorded(rig)
    with refused(invalid, "is no node of the live graph that executable"):
        driver.graph_exec_kernel_node_set_params(on.graph_exec, other.kernel, *launch)
    driver.graph_launch(on.graph_exec, rig.stream)
    assert floats(rig, on.z) == [2] * 4


def test_nodes_die_with_their_graph(rig: Rig, recorded: Recorded) -> None:
    """Its executables still replay, and can no longer be changed node by node."""
    driver, on = rig.driver, recorded
    driver.graph_destroy(on.graph)
    with refused("CUDA_ERROR_INVALID_VALUE", "is no node of the live graph that executable"):
        driver.graph_exec_memset_node_set_params(on.graph_exec, on.fill, on.y, 0, 4, on.context)
    with refused("CUDA_ERROR_INVALID_VALUE", "is no node of a live graph"):
        driver.graph_memset_node_set_params(on.fill, on.y, 0, 4, on.context)
    driver.graph_launch(on.graph_exec, rig.stream)
    assert floats(rig, on.z) == [2] * 4
