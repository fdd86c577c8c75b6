"""Timing events: marks in the compute stream."""

from __future__ import annotations

import numpy as np
import pytest

import nxrt_cuda as nx


def test_elapsed_time_covers_the_work_between_two_events(rt: nx.CudaRuntime) -> None:
    """A large copy between two marks takes longer than nothing does, and no time is negative."""
    tensor = rt.empty((8 << 20,), nx.uint8)
    start = rt.record_event()
    middle = rt.record_event()
    tensor.copy_from(np.ones(tensor.shape, np.uint8))
    end = rt.record_event()
    assert 0 <= start.elapsed_time(middle) < middle.elapsed_time(end)


def test_events_are_reused_and_returned_to_the_driver(rt: nx.CudaRuntime) -> None:
    """A dropped event serves again; closing the runtime destroys them all, those still held too."""
    held = [rt.record_event() for _ in range(2)]
    held[0].elapsed_time(held[1])
    events = rt._driver.live().events
    for _ in range(100):
        held = [rt.record_event(), held[0]]
    assert held[1].elapsed_time(held[0]) >= 0
    assert rt._driver.live().events <= events + 1
    rt.close()
    with pytest.raises(nx.RuntimeStateError, match="is closed"):
        held[0].elapsed_time(held[1])


def test_events_are_refused_in_a_capture_which_stays_usable(rt: nx.CudaRuntime) -> None:
    """Neither recording nor reading an event may spoil a capture."""
    tensor = rt.zeros((4,), nx.float32)
    start, end = rt.record_event(), rt.record_event()
    with rt.capture() as graph:
        with pytest.raises(nx.CaptureError, match="record_event is illegal while"):
            rt.record_event()
        with pytest.raises(nx.CaptureError, match="elapsed_time is illegal while"):
            start.elapsed_time(end)
        rt.fill_zero(tensor)
    assert graph.node_types == ("MEMSET",)
