"""Traces on a GPU: device times from its own events, on the host's time axis; and graphs as pictures."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
from tests.small_kernels import ADD_ONE, SLOW
from tests.test_trace import names, spans

pytestmark = pytest.mark.alone

_TOLERANCE_US = 100.0
"""Between the clocks of host and device; an alignment is good to some 10 us."""


def test_device_spans_are_as_long_as_the_kernels(rt: nx.CudaRuntime) -> None:
    """Kernels of 5 ms back to back: each span 5 ms and little more, none overlapping, all of them inside the waits."""
    launch = SLOW.prepare(rt, 1, 5)
    rt.launch(launch)
    with rt.trace() as trace:
        for _ in range(4):
            rt.launch(launch)
        rt.synchronize()
    host, device = spans(trace, device=False), spans(trace, device=True)
    assert names(device) == ["slow"] * 4
    for call, work in zip(host, device, strict=False):
        assert 5_000 <= work["dur"] < 5_500
        assert work["ts"] >= call["ts"] - _TOLERANCE_US
    for before, after in pairwise(device):
        # A microsecond of rounding: events are good to half of one.
        assert after["ts"] >= before["ts"] + before["dur"] - 1
    wait = host[-1]
    end = device[-1]["ts"] + device[-1]["dur"]
    assert wait["ts"] < end < wait["ts"] + wait["dur"] + _TOLERANCE_US


def test_a_long_trace_stays_aligned(rt: nx.CudaRuntime) -> None:
    """After two seconds, too, work ends just before the wait for it does."""
    launch = SLOW.prepare(rt, 1, 2)
    rt.launch(launch)
    with rt.trace() as trace:
        for _ in range(5):
            rt.launch(launch)
            rt.synchronize()
            time.sleep(0.4)
    device = spans(trace, device=True)
    waits = [span for span in spans(trace, device=False) if span["name"] == "wait: synchronize"]
    assert len(device) == len(waits) == 5
    for work, wait in zip(device, waits, strict=True):
        end, returned = work["ts"] + work["dur"], wait["ts"] + wait["dur"]
        assert returned - 1_000 < end < returned + _TOLERANCE_US


def test_captures_stay_clean_and_replays_are_timed(rt: nx.CudaRuntime) -> None:
    """No event ends up in the graph, and the span of a replay is as long as its kernels."""
    x = rt.zeros((4,), nx.float32)
    slow, add = SLOW.prepare(rt, 1, 3), ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        with rt.capture(name="step") as graph:
            rt.launch(slow)
            rt.launch(add)
        for _ in range(3):
            graph.replay()
        assert x.numpy().tolist() == [3, 3, 3, 3]
    assert graph.node_types == ("KERNEL", "KERNEL")
    replays = [span for span in spans(trace, device=True) if span["name"] == "step"]
    assert len(replays) == 3
    assert all(3_000 <= span["dur"] < 3_500 for span in replays)
    assert trace.unmeasured == 0


def test_a_long_trace_holds_few_events(rt: nx.CudaRuntime) -> None:
    """Ten thousand launches are all timed with the events of those in flight."""
    x = rt.zeros((4,), nx.float32)
    add = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.trace() as trace:
        for _ in range(10_000):
            rt.launch(add)
    assert x.numpy().tolist() == [10_000] * 4
    assert len(spans(trace, device=True)) == 10_000
    assert len(rt._streams._events) < 5_000


@pytest.mark.parametrize("asynchronous", [False, True])
def test_copies_are_timed_on_their_stream(rt: nx.CudaRuntime, asynchronous: bool) -> None:
    """64 MiB take between one and a hundred milliseconds, whichever stream they go by."""
    array = np.ones(64 << 20, np.uint8)
    tensor = rt.empty(array.shape, nx.uint8)
    rt.write(tensor, array)
    with rt.trace() as trace:
        rt.write(tensor, array, asynchronous=asynchronous)
        rt.synchronize()
    (copy,) = [span for span in spans(trace, device=True) if span["cat"] == "memcpy"]
    assert copy["tid"] == (2 if asynchronous else 1)
    assert copy["args"]["bytes"] == array.nbytes
    assert 1_000 < copy["dur"] < 100_000


def test_the_file_and_the_picture_name_the_operator(rt: nx.CudaRuntime, tmp_path: Path) -> None:
    """With its registers and shared memory as the driver knows them."""
    q = rt.from_array(np.ones((1, 2, 64, 64), np.float16))
    out = rt.empty(q.shape, nx.float16)
    kernel = nx.create_kernel(rt, nx.Node("Attention", attributes={"is_causal": 1}))
    path = tmp_path / "trace.json"
    with rt.trace(path):
        kernel.execute([q, q, q], [out])
        with rt.capture([kernel]) as graph:
            kernel.execute([q, q, q], [out])
        graph.replay()
    events = json.loads(path.read_text())["traceEvents"]
    (launched,) = [event for event in events if event.get("cat") == "kernel"]
    assert launched["name"].startswith("Attention: ")
    assert launched["args"]["registers"] > 0
    assert f'label="{launched["name"]}\\n' in graph.to_dot()
