"""Traces: what is in them, that they cost nothing while none is open, and that they never get in the way."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import timeit
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda import trace as trace_module
from nxrt_cuda.driver.base import ReadyCall
from tests.small_kernels import ADD_ONE, FAULT, HOST_ENTRIES, SLOW, on_thread

Events = list[dict[str, Any]]


def spans(trace: nx.Trace, *, device: bool) -> Events:
    """The complete events of the device, or of the host, in order."""
    return [event for event in trace.events() if event["ph"] == "X" and (event["pid"] == 0) == device]


def names(events: Events) -> list[str]:
    return [event["name"] for event in events]


def categories(events: Events) -> list[str]:
    return [event["cat"] for event in events]


@pytest.fixture
def x(rt: nx.CudaRuntime) -> nx.TensorMut:
    return rt.zeros((4,), nx.float32)


# What is in a trace.


def test_launches_copies_and_fills_have_a_span_on_the_host_and_one_on_the_device(
    rt: nx.CudaRuntime, x: nx.TensorMut
) -> None:
    """In the order of the calls, named by kernel or direction, with their sizes."""
    y = rt.empty((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        x.copy_from(np.arange(4, dtype=np.float32))
        rt.launch(launch)
        rt.copy(y, x)
        rt.fill_zero(x)
        assert y.numpy().tolist() == [1, 2, 3, 4]
    host, device = spans(trace, device=False), spans(trace, device=True)
    assert names(host) == [
        "memcpy HtoD",
        "launch add_one",
        "memcpy DtoD",
        "memset",
        "memcpy DtoH",
        "wait: numpy",
    ]
    assert names(device) == ["memcpy HtoD", "add_one", "memcpy DtoD", "memset", "memcpy DtoH"]
    assert categories(device) == ["memcpy", "kernel", "memcpy", "memset", "memcpy"]
    assert host[0]["args"] == {"bytes": 16, "operation": "copy_from"}
    assert device[1]["args"]["grid"] == (1, 1, 1)
    assert device[1]["args"]["block"] == (128, 1, 1)


def test_a_kernel_s_launch_is_named_by_operator_and_entry(rt: nx.CudaRuntime) -> None:
    """With its specialisation among the details; compiling and loading it have spans too."""
    q = rt.zeros((1, 2, 8, 16), nx.float32)
    kernel = nx.create_kernel(rt, nx.Node("Attention", attributes={"is_causal": 1}))
    out = rt.empty(q.shape, nx.float32)
    with rt.trace() as trace:
        kernel.execute([q, q, q], [out])
        kernel.execute([q, q, q], [out])
    host = spans(trace, device=False)
    assert names(host)[:4] == [
        "compile flash_attention_f32_bf16x6",
        "load flash_attention_f32_bf16x6",
        "launch Attention: flash_attention_f32_bf16x6",
        "launch Attention: flash_attention_f32_bf16x6",
    ]
    assert host[0]["args"]["arch"] == "host"
    assert host[0]["args"]["from_cache"] is False
    (first, second) = spans(trace, device=True)
    assert first["name"] == second["name"] == "Attention: flash_attention_f32_bf16x6"
    assert "HEAD_DIM=16" in first["args"]["variant"]


def test_device_spans_follow_their_calls_and_one_another(rt: nx.CudaRuntime) -> None:
    """On the host's time axis, none before its call and none overlapping the next of its stream."""
    launch = SLOW.prepare(rt, 1, 5)
    with rt.trace() as trace:
        for _ in range(3):
            rt.launch(launch)
        rt.synchronize()
    host, device = spans(trace, device=False), spans(trace, device=True)
    for call, work in zip(host, device, strict=False):
        assert work["ts"] > call["ts"]
        assert 5_000 <= work["dur"] < 500_000
    for before, after in pairwise(device):
        assert after["ts"] >= before["ts"] + before["dur"]
    wait = host[-1]
    assert wait["name"] == "wait: synchronize"
    assert wait["ts"] + wait["dur"] >= device[-1]["ts"] + device[-1]["dur"] - 1_000


def test_flows_join_every_call_to_its_work(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        for _ in range(3):
            rt.launch(launch)
    events = list(trace.events())
    starts, ends = ({e["id"]: e["ts"] for e in events if e["ph"] == phase} for phase in "sf")
    assert sorted(starts) == sorted(ends) == [1, 2, 3]
    assert list(starts.values()) == [span["ts"] for span in spans(trace, device=False)]
    assert list(ends.values()) == [span["ts"] for span in spans(trace, device=True)]


def test_asynchronous_copies_are_on_the_transfer_stream(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    with rt.trace() as trace:
        rt.write(x, np.ones(4, np.float32), asynchronous=True)
        assert rt.read_async(x).numpy().tolist() == [1, 1, 1, 1]
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in trace.events()
        if event["ph"] == "M" and event["pid"] == 0 and event["name"] == "thread_name"
    }
    device = spans(trace, device=True)
    assert [tracks[event["tid"]] for event in device] == ["transfer stream"] * 2
    assert names(spans(trace, device=False))[-1] == "wait: pending read"


def test_threads_have_tracks_of_their_own(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        rt.launch(launch)
        on_thread(rt.launch, launch)
    here, there = (span["tid"] for span in spans(trace, device=False))
    assert here != there


def test_a_failed_call_says_so(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    """Its span carries the error, and no device span is made up for it."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        rt._driver.fail_call(error="CUDA_ERROR_INVALID_VALUE", call="launch_kernel")
        with pytest.raises(nx.DriverError):
            rt.launch(launch)
    (host,) = spans(trace, device=False)
    assert host["args"]["error"] == "DriverError"
    assert spans(trace, device=True) == []


# Captures and replays.


def test_a_capture_records_no_event_and_each_replayed_segment_has_a_device_span(
    rt: nx.CudaRuntime, x: nx.TensorMut
) -> None:
    """The graph holds the launches alone; what is recorded has host spans inside that of the capture."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        with rt.capture(name="step") as graph:
            rt.launch(launch)
            rt.fill_zero(x)
        with rt.capture(into=graph):
            rt.launch(launch)
        graph.replay()
        graph.replay_segment(1)
        assert x.numpy().tolist() == [2, 2, 2, 2]
    assert graph.node_types == ("KERNEL", "MEMSET", "KERNEL")
    host, device = spans(trace, device=False), spans(trace, device=True)
    assert names(host)[:5] == ["record add_one", "record memset", "capture step", "record add_one", "capture step"]
    capture, recorded = host[2], host[0]
    assert capture["ts"] <= recorded["ts"]
    assert recorded["ts"] + recorded["dur"] <= capture["ts"] + capture["dur"]
    assert names(host)[5:8] == ["replay step, segment 0", "replay step, segment 1", "replay step, segment 1"]
    assert names(device)[:3] == ["step, segment 0", "step, segment 1", "step, segment 1"]
    assert [event["args"]["nodes"] for event in device[:3]] == [2, 1, 1]


def test_an_aborted_capture_leaves_a_trace_that_goes_on(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    launch = ADD_ONE.prepare(rt, 4, x, 4)

    def fail_in_a_capture() -> None:
        with rt.capture():
            rt.launch(launch)
            raise ZeroDivisionError

    with rt.trace() as trace:
        with pytest.raises(ZeroDivisionError):
            fail_in_a_capture()
        rt.launch(launch)
    assert names(spans(trace, device=False)) == ["record add_one", "capture graph 1", "launch add_one"]
    assert names(spans(trace, device=True)) == ["add_one"]


def test_a_trace_neither_begins_nor_ends_in_a_capture_which_stays_usable(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        with pytest.raises(nx.CaptureError, match="trace is illegal while this thread captures"):
            rt.trace()
        rt.launch(launch)
    trace = rt.trace()
    with rt.capture(into=graph):
        with pytest.raises(nx.CaptureError, match="cannot end a trace while this thread captures a CUDA graph"):
            trace.close()
        rt.launch(launch)
    assert not trace.is_closed
    trace.close()
    graph.replay()
    assert x.numpy().tolist() == [2, 2, 2, 2]


# The file.


def test_the_file_is_chrome_s_format(rt: nx.CudaRuntime, x: nx.TensorMut, tmp_path: Path) -> None:
    """One JSON object; every event has a phase, a place and, but for names, a time; durations are not negative."""
    path = tmp_path / "trace.json"
    with rt.trace(path):
        rt.launch(ADD_ONE.prepare(rt, 4, x, 4))
        x.numpy()
    written = json.loads(path.read_text())
    assert written["otherData"]["device"] == "host"
    assert written["otherData"]["dropped_spans"] == 0
    for event in written["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"]
    assert {event["ph"] for event in written["traceEvents"]} == {"M", "X", "s", "f"}


def test_save_ends_the_trace_and_may_be_repeated(rt: nx.CudaRuntime, x: nx.TensorMut, tmp_path: Path) -> None:
    trace = rt.trace()
    rt.launch(ADD_ONE.prepare(rt, 4, x, 4))
    trace.save(tmp_path / "a.json")
    assert trace.is_closed
    rt.synchronize()
    trace.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_path_that_cannot_be_written_is_refused_at_once(rt: nx.CudaRuntime, tmp_path: Path) -> None:
    """And no trace is left open."""
    with pytest.raises(FileNotFoundError):
        rt.trace(tmp_path / "missing" / "trace.json")
    rt.trace().close()


def test_one_trace_at_a_time(rt: nx.CudaRuntime) -> None:
    with rt.trace(), pytest.raises(nx.RuntimeStateError, match="a trace of this runtime is open already"):
        rt.trace()
    rt.trace().close()


def test_closing_the_runtime_ends_the_trace_and_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as rt:
        x = rt.zeros((4,), nx.float32)
        trace = rt.trace(path)
        rt.launch(ADD_ONE.prepare(rt, 4, x, 4))
    assert trace.is_closed
    assert "add_one" in names(json.loads(path.read_text())["traceEvents"])


def test_a_trace_that_cannot_be_written_keeps_no_runtime_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and the trace can be written elsewhere."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as rt:
        driver = rt._driver
        trace = rt.trace(folder / "trace.json")
        rt.zeros((4,), nx.float32)
        shutil.rmtree(folder)
    assert rt.is_closed
    assert not driver.live()
    assert [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    trace.save(tmp_path / "trace.json")
    assert "memset" in names(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


# Bounds.


def test_a_full_trace_drops_and_counts_what_comes_later(
    rt: nx.CudaRuntime, x: nx.TensorMut, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so in the log and in the trace, and makes no more events."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with caplog.at_level(logging.WARNING, "nxrt_cuda"), rt.trace(max_spans=3) as trace:
        for _ in range(3):
            rt.launch(launch)
        recorded = rt._driver.calls["event_record"]
        for _ in range(7):
            rt.launch(launch)
        assert rt._driver.calls["event_record"] == recorded
    assert len(spans(trace, device=False)) == len(spans(trace, device=True)) == 3
    assert trace.dropped == 7
    assert "7 later span(s) were dropped" in caplog.text
    (note,) = [event for event in trace.events() if event["ph"] == "i"]
    assert "7 later span(s) dropped" in note["name"]
    assert x.numpy().tolist() == [10] * 4


def test_a_trace_must_keep_something(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.RuntimeStateError, match="max_spans=0"):
        rt.trace(max_spans=0)


def test_a_long_trace_holds_few_driver_events(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    """Those of finished work are read and used again while the trace goes on."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        for _ in range(4_000):
            rt.launch(launch)
        assert rt._driver.live().events < 2_500
    assert len(spans(trace, device=True)) == 4_000


# Never in the way.


def test_work_is_done_though_its_events_fail(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    """A launch whose mark the driver refuses is launched, and counted as unmeasured."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        for _ in range(2):
            rt._driver.fail_call(error="CUDA_ERROR_OUT_OF_MEMORY", call="event_record")
            rt.launch(launch)
        rt.launch(launch)
    assert x.numpy().tolist() == [3] * 4
    assert len(spans(trace, device=False)) == 3
    assert len(spans(trace, device=True)) == 1
    assert trace.unmeasured == 2


def test_unreadable_times_cost_their_span_alone(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        for _ in range(3):
            rt.launch(launch)
        rt._driver.fail_call(error="CUDA_ERROR_INVALID_HANDLE", call="event_elapsed_time")
    assert len(spans(trace, device=True)) == 2
    assert trace.unmeasured == 1


def test_a_fault_leaves_a_trace_of_what_the_host_did(tmp_path: Path) -> None:
    """The file is written all the same, and says why it has no device times."""
    path = tmp_path / "trace.json"
    runtime = nx.open_runtime("host", host_entries=HOST_ENTRIES)
    launch = FAULT.prepare(runtime, 1, 4096)
    with runtime.trace(path):
        runtime.launch(launch)
        with pytest.raises(nx.DeviceFaultError):
            runtime.synchronize()
    runtime.close()
    written = json.loads(path.read_text())
    assert "launch fault" in names(written["traceEvents"])
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in written["otherData"]["device_times_lost"]
    assert written["otherData"]["unmeasured_device_spans"] == 1


def test_any_driver_call_may_fail_in_a_trace() -> None:
    """Each in turn: nothing but a typed error, no trace left open, no leak, and the next run is right."""

    def scenario(rt: nx.CudaRuntime, launch: nx.PreparedLaunch, x: nx.TensorMut) -> None:
        with rt.trace():
            rt.fill_zero(x)
            with rt.capture() as graph:
                rt.launch(launch)
            rt.launch(launch)
            graph.replay()
            rt.synchronize()

    calls = None
    n = 0
    while calls is None or n < calls:
        n += 1
        with nx.open_runtime("host", host_entries=HOST_ENTRIES) as rt:
            driver = rt._driver
            x = rt.zeros((4,), nx.float32)
            launch = ADD_ONE.prepare(rt, 4, x, 4)
            if calls is None:
                before = driver.calls_total
                scenario(rt, launch, x)
                calls = driver.calls_total - before
            driver.fail_call(n)
            with suppress(nx.NxrtError):
                scenario(rt, launch, x)
            assert rt._session.tracer is None
            assert not rt.is_capturing()
            scenario(rt, launch, x)
            assert x.numpy().tolist() == [2] * 4, n
        assert not driver.live()
    assert n > 30


def test_drift_between_the_clocks_is_taken_out(rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose clock runs at twice the speed gives the same spans."""
    elapsed = rt._driver.event_elapsed_time
    monkeypatch.setattr(rt._driver, "event_elapsed_time", lambda start, end: 2 * elapsed(start, end))
    monkeypatch.setattr(trace_module, "_DRIFT_FROM", 0.0)
    launch = SLOW.prepare(rt, 1, 50)
    with rt.trace() as trace:
        rt.launch(launch)
        rt.synchronize()
    (span,) = spans(trace, device=True)
    assert 45_000 < span["dur"] < 90_000


# NVTX.


def test_host_spans_are_nvtx_ranges_where_that_is_installed(
    rt: nx.CudaRuntime, x: nx.TensorMut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushed and popped in turn, in a domain of this package; failures and captures included."""
    calls: list[str] = []

    def push_range(message: str, domain: str) -> None:
        assert domain == "nxrt_cuda"
        calls.append(message)

    monkeypatch.setitem(
        sys.modules, "nvtx", SimpleNamespace(push_range=push_range, pop_range=lambda domain: calls.append("pop"))
    )
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace():
        with rt.capture(name="step"):
            rt.launch(launch)
        rt._driver.fail_call(error="CUDA_ERROR_INVALID_VALUE", call="launch_kernel")
        with pytest.raises(nx.DriverError):
            rt.launch(launch)
    rt.launch(launch)
    assert calls == ["capture step", "record add_one", "pop", "pop", "launch add_one", "pop"]


def test_no_nvtx_is_no_error(rt: nx.CudaRuntime, x: nx.TensorMut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with rt.trace() as trace:
        rt.launch(ADD_ONE.prepare(rt, 4, x, 4))
    assert "launch add_one" in names(spans(trace, device=False))


# Cost while no trace is open.


def calls_of(function: Callable[[], None]) -> list[str]:
    """The Python functions of this package that one call of ``function`` calls."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "nxrt_cuda" in frame.f_code.co_filename:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def test_without_a_trace_launches_and_replays_call_nothing_of_it(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    """Neither before there was one nor after; the launch path stays the few functions that it is."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    rt.launch(launch)
    before = calls_of(lambda: rt.launch(launch, [x])), calls_of(graph.replay)
    with rt.trace():
        traced = calls_of(lambda: rt.launch(launch, [x]))
    after = calls_of(lambda: rt.launch(launch, [x])), calls_of(graph.replay)
    assert before == after
    assert any(name.startswith("Trace.") for name in traced)
    for called in before:
        of_the_runtime = [name for name in called if name.startswith(("CudaRuntime.", "Session.", "CapturedGraph."))]
        assert not [name for name in called if name.startswith(("Trace.", "Span.", "PreparedLaunch."))]
        assert len(of_the_runtime) <= 4, of_the_runtime


def test_without_a_trace_a_launch_costs_the_host_what_it_did(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    """Well under 1 us of Python in front of the driver, and after a trace no more than before; the best of many."""
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    operands = [x]
    rt.launch(launch, operands)

    def best_us() -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "start", ReadyCall(lambda: (0,), launch.start.error))
            return min(timeit.repeat(lambda: rt.launch(launch, operands), number=1_000, repeat=50)) * 1e3

    before = best_us()
    with rt.trace():
        rt.launch(launch, operands)
    assert before < 1
    assert best_us() < 1.25 * before


@pytest.mark.parametrize("moment", ["__enter__", "__exit__"])
def test_a_span_that_fails_leaves_no_capture_open(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Neither the stream stays in capture mode, nor the runtime locked for other threads."""
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)

    def fail(span: trace_module.Span, *error: object) -> None:
        if span._activity.kind == "capture":
            raise ZeroDivisionError
        whole(span, *error)

    whole = getattr(trace_module.Span, moment)
    with rt.trace():
        with monkeypatch.context() as broken:
            broken.setattr(trace_module.Span, moment, fail)
            with pytest.raises(ZeroDivisionError), rt.capture():
                rt.launch(launch)
        assert not rt.is_capturing()
        assert rt.capture_status() is nx.CaptureStatus.NONE
        on_thread(rt.launch, launch)
