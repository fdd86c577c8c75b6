"""What a runtime does, as a timeline: a Chrome trace of the host's calls and of the device's work.

Host spans are of ``time.perf_counter``. Device spans lie between two timing events on the stream of the
work, so one holds the gap until the host has delivered the work too: on an idle device, a few
microseconds. Work that is recorded into a graph gets a host span only; the graph's replays get a device
span each. Host and device share one time axis: they are aligned when the trace begins, and once more when
it ends, so that a long trace does not drift apart.

Where the package ``nvtx`` is installed every host span is an NVTX range too, of the domain ``nxrt_cuda``.

Open the file in https://ui.perfetto.dev or ``chrome://tracing``.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

from nxrt_cuda.activity import Activity
from nxrt_cuda.context import Session
from nxrt_cuda.errors import CaptureError, DeviceFaultError, DriverError, NxrtError, RuntimeStateError
from nxrt_cuda.streams import Streams

__all__ = ["Span", "Trace"]

logger = logging.getLogger("nxrt_cuda")

MAX_SPANS = 250_000
"""Host spans that a trace keeps by default: some 50 MB."""

_NVTX_DOMAIN = "nxrt_cuda"

_RESOLVE_FROM = 512
"""Device spans that are still two driver events; above this many, those that are done become two numbers."""

_ALIGNMENTS = 3
_DRIFT_FROM = 1.0
"""Seconds from which two alignments say more of the clocks' drift than of their own error, some 10 us."""

_HOST_WORDS = {"kernel": "launch", "graph": "replay"}
"""What the host does to start work of a kind, where that is not called by the kind itself."""

_DEVICE_PROCESS = 0


class _HostSpan(NamedTuple):
    """One call of the host: seconds of ``perf_counter``. ``flow`` joins it to its device span; 0 has none."""

    activity: Activity
    recorded: bool
    error: str
    thread: int
    start: float
    end: float
    flow: int


class _Pending(NamedTuple):
    """Work on a stream between two timing events."""

    activity: Activity
    stream: int
    begin: int
    end: int
    flow: int


class _DeviceSpan(NamedTuple):
    """Work on a stream: seconds since the trace's first event, and seconds that it took."""

    activity: Activity
    stream: int
    start: float
    duration: float
    flow: int


class Span:
    """One call under way; a context manager around it. Work on a stream is begun with the runtime's lock held."""

    __slots__ = ("_activity", "_begin", "_recorded", "_start", "_stream", "_trace")

    def __init__(self, trace: Trace, activity: Activity, stream: int | None) -> None:
        self._trace = trace
        self._activity = activity
        self._stream = stream
        self._recorded = False
        self._begin: int | None = None

    def __enter__(self) -> Span:
        trace = self._trace
        if self._stream is not None:
            self._recorded = trace.is_capturing
            self._begin = trace.mark(self._stream)
        trace.push(self._activity, self._recorded)
        self._start = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        end = perf_counter()
        trace = self._trace
        trace.pop()
        pending = None
        if self._stream is not None and self._begin is not None:
            last = trace.mark(self._stream) if error is None else None
            pending = (self._stream, self._begin, last)
        trace.add(self._activity, self._recorded, "" if kind is None else kind.__name__, self._start, end, pending)


class Trace:
    """What one runtime does between the opening and the closing of the trace. Made by ``CudaRuntime.trace()``.

    Attributes:
        dropped: spans that were not kept because there were ``max_spans`` already.
    """

    def __init__(
        self,
        session: Session,
        streams: Streams,
        path: str | os.PathLike[str] | None,
        max_spans: int,
        about: Mapping[str, str],
    ) -> None:
        if max_spans < 1:
            raise RuntimeStateError(f"a trace keeps at least one span, not max_spans={max_spans}")
        self.dropped = 0
        self._session = session
        self._streams = streams
        self._path = path
        self._about = dict(about)
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._host: list[_HostSpan] = []
        self._device: list[_DeviceSpan] = []
        self._pending: deque[_Pending] = deque()
        self._flows = 0
        self._unmeasured = 0
        self._threads: dict[int, str] = {}
        self._drift = 1.0
        # Taken when the trace is closed: the streams may be gone when it is read.
        self._stream_names: dict[int, str] | None = None
        self._problem = ""
        self._nvtx: Any = None
        with suppress(ImportError):
            self._nvtx = importlib.import_module("nvtx")
        streams.wait(streams.compute, "trace")
        with session.driving("trace"):
            if session.tracer is not None:
                raise RuntimeStateError("a trace of this runtime is open already; close it first")
            if path is not None:
                with open(path, "w"):
                    pass  # A path that cannot be written is refused now, not when the work is done.
            # Device time is a chain of differences between events, each to the one before: as one
            # difference to the first event, a float of milliseconds would have no microseconds after a minute.
            self._last, self._opened = self._align()
            self._offset = 0.0
            session.tracer = self

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._session.tracer is not self

    def __repr__(self) -> str:
        spans = len(self._host) + len(self._device)
        return f"Trace({spans} span(s), {'closed' if self.is_closed else 'open'})"

    @property
    def unmeasured(self) -> int:
        """Device spans without a time: the driver refused an event of theirs, or they are not done yet."""
        return self._unmeasured + len(self._pending)

    def close(self) -> None:
        """End the trace, wait for the device times, and write the file if one was named; a second call does nothing.

        On a closed or faulted runtime, what is known is kept: the host spans, and the device spans read so far.

        Raises:
            CaptureError: this thread is capturing; the trace goes on.
            OSError: the file cannot be written; :meth:`save` may write another.
        """
        session, streams = self._session, self._streams
        if session.captures_here:
            raise CaptureError(
                "cannot end a trace while this thread captures a CUDA graph; end the capture first",
                operation="trace close",
                state="capturing",
            )
        with session.lock:
            if self.is_closed:
                return
            session.tracer = None
            self._stream_names = streams.names
        try:
            for stream in (streams.transfer, streams.compute):
                streams.wait(stream, "trace close")
            with session.driving("trace close"):
                self._resolve(finished=True)
                self._correct_drift()
        except NxrtError as error:
            self._problem = str(error)
            logger.warning("the trace has no times of %d device span(s): %s", len(self._pending), error)
        if self.dropped:
            logger.warning("the trace is full: %d later span(s) were dropped; raise max_spans", self.dropped)
        if self._path is not None:
            self.save(self._path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to ``path``, as JSON; ends it first.

        Raises:
            CaptureError: the trace is open and this thread is capturing.
            OSError: the file cannot be written.
        """
        if not self.is_closed:
            self.close()
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(self._other())},\n"traceEvents": [\n')
            separator = ""
            for event in self.events():
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
            file.write("\n]}\n")

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace in Chrome's event format, times in microseconds since it began; complete once it is closed."""
        process = os.getpid()
        yield _named("process_name", process, 0, f"host (process {process})")
        yield _named("process_name", _DEVICE_PROCESS, 0, self._about.get("device", "device"))
        for thread, name in list(self._threads.items()):
            yield _named("thread_name", process, thread, name)
        names = self._streams.names if self._stream_names is None else self._stream_names
        tracks = {stream: (track, name) for track, (stream, name) in enumerate(names.items(), 1)}
        for track, name in tracks.values():
            yield _named("thread_name", _DEVICE_PROCESS, track, name)
        for span in list(self._host):
            place = {"pid": process, "tid": span.thread, "ts": self._host_time(span.start)}
            details = {**span.activity.details, **({"error": span.error} if span.error else {})}
            yield {
                "ph": "X",
                "cat": _word(span.activity),
                "name": _title(span.activity, span.recorded),
                **place,
                "dur": _microseconds(span.end - span.start),
                "args": details,
            }
            if span.flow:
                yield {"ph": "s", "cat": "flow", "name": "flow", "id": span.flow, **place}
        for done in list(self._device):
            time = _microseconds(done.start * self._drift)
            place = {"pid": _DEVICE_PROCESS, "tid": tracks[done.stream][0], "ts": time}
            yield {
                "ph": "X",
                "cat": done.activity.kind,
                "name": done.activity.name,
                **place,
                "dur": _microseconds(done.duration * self._drift),
                "args": dict(done.activity.details),
            }
            yield {"ph": "f", "bp": "e", "cat": "flow", "name": "flow", "id": done.flow, **place}
        if self.dropped:
            yield {
                "ph": "i",
                "s": "g",
                "name": f"trace full: {self.dropped} later span(s) dropped",
                "pid": process,
                "tid": 0,
                "ts": self._host_time(self._host[-1].end),
            }

    def _other(self) -> dict[str, Any]:
        lost = {"device_times_lost": self._problem} if self._problem else {}
        return {
            **self._about,
            "dropped_spans": self.dropped,
            "unmeasured_device_spans": self.unmeasured,
            **lost,
        }

    def _host_time(self, time: float) -> float:
        return _microseconds(time - self._opened)

    # What the rooms of the runtime call while the trace is open.

    def span(self, activity: Activity, stream: int | None = None) -> Span:
        """A span around a call; with ``stream``, around work that it puts there, the runtime's lock held."""
        return Span(self, activity, stream)

    def run(self, activity: Activity, stream: int, call: Callable[..., None], *arguments: object) -> None:
        """``call(*arguments)`` in a span around the work that it puts on ``stream``; the lock is held."""
        with Span(self, activity, stream):
            call(*arguments)

    @property
    def is_capturing(self) -> bool:
        return self._session.capturing

    # What spans call.

    def mark(self, stream: int) -> int | None:
        """A timing event on ``stream``; None in a capture, where the trace is full, and where there is none to be had.

        Raises:
            DeviceFaultError: the context is lost.
        """
        if self._session.capturing or len(self._host) >= self._max_spans:
            return None
        try:
            with self._session.current():
                return self._streams.record(stream, timing=True)
        except DeviceFaultError:
            raise
        except DriverError:
            self._unmeasured += 1
            return None

    def push(self, activity: Activity, recorded: bool) -> None:
        if self._nvtx is not None:
            self._nvtx.push_range(_title(activity, recorded), domain=_NVTX_DOMAIN)

    def pop(self) -> None:
        if self._nvtx is not None:
            self._nvtx.pop_range(domain=_NVTX_DOMAIN)

    def add(
        self,
        activity: Activity,
        recorded: bool,
        error: str,
        start: float,
        end: float,
        marks: tuple[int, int, int | None] | None,
    ) -> None:
        """Keep one span. ``marks`` are the stream of its work and the events before and after it."""
        thread = threading.get_native_id()
        with self._lock:
            kept = not self.is_closed and len(self._host) < self._max_spans
            flow = 0
            if marks is not None:
                stream, begin, last = marks
                if kept and last is not None:
                    flow = self._flows = self._flows + 1
                    self._pending.append(_Pending(activity, stream, begin, last, flow))
                else:
                    self._recycle(begin, *(() if last is None else (last,)))
            if kept:
                if thread not in self._threads:
                    self._threads[thread] = threading.current_thread().name
                self._host.append(_HostSpan(activity, recorded, error, thread, start, end, flow))
            elif not self.is_closed:
                self.dropped += 1
        if marks is not None and len(self._pending) >= _RESOLVE_FROM:
            with suppress(CaptureError), self._session.driving("reading a trace's events"):
                self._resolve(finished=False)

    # Device time.

    def _align(self) -> tuple[int, float]:
        """An event on the idle compute stream, and when it took place by the host's clock."""
        best = None
        for _ in range(_ALIGNMENTS):
            before = perf_counter()
            event = self._streams.record(self._streams.compute, timing=True)
            self._session.driver.event_synchronize(event)
            after = perf_counter()
            if best is None or after - before < best[0]:
                if best is not None:
                    self._recycle(best[1])
                best = (after - before, event, (before + after) / 2)
            else:
                self._recycle(event)
        assert best is not None
        return best[1], best[2]

    def _resolve(self, *, finished: bool) -> None:
        """Turn pairs of events into times, oldest first, up to one that is not done; ``finished`` says all are."""
        driver = self._session.driver
        while self._pending:
            pending = self._pending[0]
            try:
                if not finished and not driver.event_query(pending.end):
                    return
                gap = driver.event_elapsed_time(self._last, pending.begin)
                duration = driver.event_elapsed_time(pending.begin, pending.end)
            except DeviceFaultError:
                raise
            except DriverError:
                self._unmeasured += 1
                self._recycle(pending.begin, pending.end)
            else:
                self._offset += gap / 1e3
                self._device.append(
                    _DeviceSpan(pending.activity, pending.stream, self._offset, duration / 1e3, pending.flow)
                )
                self._recycle(self._last, pending.end)
                self._last = pending.begin
            self._pending.popleft()

    def _correct_drift(self) -> None:
        """Stretch the device's time to the host's by what the two say of the length of the trace."""
        event, now = self._align()
        elapsed = now - self._opened
        counted = self._offset + self._session.driver.event_elapsed_time(self._last, event) / 1e3
        self._recycle(self._last, event)
        if elapsed >= _DRIFT_FROM:
            self._drift = elapsed / counted

    def _recycle(self, *events: int) -> None:
        for event in events:
            self._streams.recycle(event, timing=True)


def _word(activity: Activity) -> str:
    return _HOST_WORDS.get(activity.kind, activity.kind)


def _title(activity: Activity, recorded: bool) -> str:
    """The name of a host span."""
    word = "record" if recorded else _HOST_WORDS.get(activity.kind)
    return activity.name if word is None else f"{word} {activity.name}"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
