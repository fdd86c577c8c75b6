"""One device's primary context, and a runtime's way into the driver.

:class:`PrimaryContext` is retained once per device and process however many runtimes use it; it is
never reset, so PyTorch, CuPy and this package share one device state. :class:`Session` is what every
room of a runtime goes through to reach the driver. It makes sure that

- one thread at a time works on the runtime, and a capturing thread keeps the others out until the
  capture has ended (the *capture gate*: a launch, an allocation or a module load of another thread
  would otherwise end up in the graph or spoil it);
- the context is current on the calling thread, and the caller's own, if it has one, is back afterwards;
- a closed, forked or faulted runtime refuses, with the reason, before it touches the driver;
- what Python's collector drops, at any instruction and in a capture too, is released later: finalisers
  only append to a queue, which :meth:`Session.collect` empties outside captures.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from time import sleep
from typing import TYPE_CHECKING, ClassVar

from nxrt_cuda.activity import Activity
from nxrt_cuda.driver.base import Driver
from nxrt_cuda.errors import CaptureError, DeviceFaultError, DriverError, NxrtError, RuntimeStateError

if TYPE_CHECKING:
    from nxrt_cuda.trace import Trace

__all__ = ["Capabilities", "PrimaryContext", "Session"]

logger = logging.getLogger("nxrt_cuda")

_CONTEXT_DESTROYED = "CUDA_ERROR_CONTEXT_IS_DESTROYED"
_CONTEXT_MISSING = frozenset({"CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE", _CONTEXT_DESTROYED})
"""How the driver refuses a call made with no context, a dead one, or that of another device."""

_PATIENCE = 0.2
"""Seconds between two looks whether the thread whose capture is waited for still lives."""

_PASSING = 20e-6
"""Seconds between two looks whether a thread still makes its call on the short way, or outside the lock."""

_SUSPECTS = 64
"""How many launches since the last good synchronise a fault report names."""


@dataclass(frozen=True)
class Capabilities:
    """What the device allows; a conservative value where the driver does not say.

    Attributes:
        compute_capability: (major, minor).
        max_grid_dim_x: blocks along x.
        max_threads_per_block: threads.
        shared_memory_per_block: bytes a block has without opting in.
        shared_memory_per_block_optin: bytes a block can have after opting in.
        multiprocessor_count: SMs.
        l2_cache_bytes: bytes of L2.
        memory_pools: whether the driver frees memory in stream order.
    """

    compute_capability: tuple[int, int]
    max_grid_dim_x: int
    max_threads_per_block: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    multiprocessor_count: int
    l2_cache_bytes: int
    memory_pools: bool

    @classmethod
    def query(cls, driver: Driver, device: int) -> Capabilities:
        def ask(attribute: str, conservative: int) -> int:
            try:
                value = driver.device_attribute(device, attribute)
            except DriverError:
                return conservative
            return value if value > 0 else conservative

        major = driver.device_attribute(device, "COMPUTE_CAPABILITY_MAJOR")
        minor = driver.device_attribute(device, "COMPUTE_CAPABILITY_MINOR")
        shared = ask("MAX_SHARED_MEMORY_PER_BLOCK", 48 * 1024)
        return cls(
            compute_capability=(major, minor),
            max_grid_dim_x=ask("MAX_GRID_DIM_X", 65535),
            max_threads_per_block=ask("MAX_THREADS_PER_BLOCK", 512),
            shared_memory_per_block=shared,
            shared_memory_per_block_optin=max(shared, ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", shared)),
            multiprocessor_count=ask("MULTIPROCESSOR_COUNT", 1),
            l2_cache_bytes=ask("L2_CACHE_SIZE", 0),
            memory_pools=bool(ask("MEMORY_POOLS_SUPPORTED", 0)),
        )


class PrimaryContext:
    """The primary context of one device, retained while anything in this process uses it.

    Attributes:
        driver: the driver that it belongs to.
        device: the device's ordinal.
        handle: the context.
        capabilities: of the device.
    """

    _retained: ClassVar[dict[tuple[int, int], PrimaryContext]] = {}
    # Reentrant: within any of these methods Python's collector may close a runtime that was dropped unclosed.
    _lock = threading.RLock()

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.handle = driver.primary_ctx_retain(device)
        self._users = 0
        try:
            self.capabilities = Capabilities.query(driver, device)
            self.device_name = driver.device_name(device)
        except BaseException:
            driver.primary_ctx_release(device)
            raise

    @classmethod
    def acquire(cls, driver: Driver, device: int) -> PrimaryContext:
        """The shared context of ``device``, retained by the first user."""
        with cls._lock:
            key = (id(driver), device)
            try:
                context = cls._retained[key]
            except KeyError:
                context = cls._retained[key] = cls(driver, device)
            context._users += 1  # with no call since it was found: one that is found cannot be gone
            return context

    def release(self) -> None:
        """Give up one use; the last one releases the context, and this thread does not keep it current."""
        with self._lock:
            if self._users == 1:
                if self.driver.ctx_get_current() == self.handle:
                    self.driver.ctx_pop_current()
                self.driver.primary_ctx_release(self.device)
                del self._retained[(id(self.driver), self.device)]
            self._users -= 1

    def abandon(self) -> None:
        """Give up one use without a driver call: the context is lost, or the parent process's."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._retained[(id(self.driver), self.device)]


_UNTRACED: AbstractContextManager[None] = nullcontext()


class _Thread(threading.local):
    """What a thread is doing: the session, of any runtime, whose capture it has open."""

    capturing: Session | None = None


_thread = _Thread()

_capturing: set[Session] = set()
"""The sessions of this process that have a capture open."""


class _Turn:
    """A time in which one thread was the last to come in.

    Attributes:
        owner: its identifier; 0 where the short way is closed to it.
        passing: whether it makes a call on the short way.
    """

    __slots__ = ("owner", "passing")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.passing = False


class _Gate:
    """The lock of one runtime: re-entrant, and kept by a capturing thread until its capture has ended.

    Waiting cannot go on for ever: a thread that captures on one runtime is refused by all others, so that two
    never wait for each other's capture; and the capture of a thread that has ended can be ended by nobody.

    Launches and replays have a *short way*. A lock costs as much as a sixth of a graph launch, so that the thread
    whose turn it is, which was in last, makes its calls without it::

        turn = gate.turn
        if turn.owner == get_ident():
            turn.passing = True
            try:
                if gate.turn is turn:
                    ...
            finally:
                turn.passing = False

    Whoever comes next takes the lock, begins a turn, and waits until nobody passes in the one before; who passes looks
    whether the turn is still the same. One of the two sees the other, and an interrupt finds no gap in between. Who
    passes must not take the lock: the one who has it may be waiting for that very passage to end.
    Nothing else is asked on the short way: it is closed while anything is in the way of a bare driver call.

    Attributes:
        turn: the present one.
        obstacles: what closes the short way: a capture, a trace, a branch, synchronous launches, or that no call is
            possible any more.
        capturer: the thread that has a capture open, or None.
    """

    __slots__ = ("_lock", "capturer", "obstacles", "turn")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.turn = _Turn(0)
        self.obstacles: set[str] = set()
        self.capturer: threading.Thread | None = None

    def acquire(self) -> None:
        """Wait until no other thread is in.

        Raises:
            CaptureError: this thread captures on another runtime; or the thread whose capture keeps this one
                closed has ended.
        """
        if self._lock.acquire(False):
            if not _capturing or self._admits_this_thread():
                if self.turn.owner != get_ident():
                    self._begin_turn()
                return
            self._lock.release()
        if _thread.capturing is not None:
            raise CaptureError(
                "this call is illegal while this thread captures a CUDA graph on another runtime, which would not "
                "record it; make it before or after the capture",
                operation="another runtime",
                state="capturing",
            )
        self._check_capturer()
        while not self._lock.acquire(timeout=_PATIENCE):
            self._check_capturer()
        self._begin_turn()

    def acquire_within(self, seconds: float) -> bool:
        """Whether no other thread is in, at the latest after ``seconds``; whatever this thread captures."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self._begin_turn()
        return True

    def release(self) -> None:
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.release()

    def _begin_turn(self) -> None:
        """Begin this thread's turn, once nobody passes in the one before; the lock is held, unless this fails."""
        before = self.turn
        if before.owner == get_ident():
            return
        self.turn = _Turn(get_ident())
        if self.obstacles:
            self.turn.owner = 0
        try:
            while before.passing:
                sleep(_PASSING)
        except BaseException:
            self.turn = before
            self._lock.release()
            raise

    def close_short_way(self, obstacle: str, closed: bool = True) -> None:
        """Close the short way because of ``obstacle``, or open it again as far as that is concerned."""
        if closed:
            self.obstacles.add(obstacle)
            self.turn.owner = 0
        else:
            self.obstacles.discard(obstacle)

    def _admits_this_thread(self) -> bool:
        """Whether this thread captures here, or nobody does and it captures nowhere else.

        The lock cannot say: it knows a thread by an identifier, which a new one may inherit from one that has ended.
        """
        return self.capturer is (None if _thread.capturing is None else threading.current_thread())

    def _check_capturer(self) -> None:
        capturer = self.capturer
        if capturer is not None and not capturer.is_alive():
            raise CaptureError(
                f"the thread {capturer.name!r} has ended without ending its capture of a CUDA graph, and no other "
                "thread may; this runtime is of no use any more, open another, and capture within 'with rt.capture()'",
                operation="waiting for a capture",
                state="capturing",
            )


class _Mark:
    """A place among the work that was enqueued."""


class Session:
    """The lock, the context and the fault state of one runtime.

    Attributes:
        driver: the driver.
        context: the context's handle.
        eager_sync: whether every launch and replay is waited for.
        lock: held for the length of every call, and by the capturing thread for a whole capture. Taking it
            may raise CaptureError.
        capturing: whether a capture is open, for threads that hold ``lock``: it is theirs then.
        suspects: labels of the work enqueued since the last good synchronise, and the marks between them.
        frees: how often memory that views may still describe was freed; they need no check while it does not change.
        dropped: what finalisers want released, as calls to make when no capture is open.
    """

    def __init__(self, primary: PrimaryContext, *, eager_sync: bool = False) -> None:
        self.primary = primary
        self.eager_sync = eager_sync
        self.driver = primary.driver
        self.context = primary.handle
        self.lock = _Gate()
        self.capturing = False
        if eager_sync:
            self.lock.close_short_way("eager_sync")
        self.suspects: deque[str | _Mark] = deque(maxlen=2 * _SUSPECTS)
        self.frees = 0
        self.dropped: deque[Callable[[], None]] = deque()
        # Who is outside, by thread: objects of their own, for adding and removing one of them is one step.
        self._outside: set[tuple[int, object]] = set()
        self._is_closing = False
        self._refusal: Callable[[], NxrtError] | None = None
        self._failing: set[Callable[[], None]] = set()
        self._tracer: Trace | None = None
        with _sessions.lock:
            _sessions.known.add(self)

    @property
    def refusal(self) -> Callable[[], NxrtError] | None:
        """Makes the error that every call now raises; None while the runtime is usable."""
        return self._refusal

    @property
    def tracer(self) -> Trace | None:
        """The open trace, or None."""
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: Trace | None) -> None:
        self._tracer = tracer
        self.lock.close_short_way("trace", tracer is not None)

    @contextmanager
    def driving(self, operation: str, *, in_capture: bool = False) -> Iterator[Driver]:
        """Hold the runtime with its context current, for one operation.

        Raises:
            CaptureError: this thread is capturing, on this runtime or another, and the operation
                would spoil that. The capture stays open and usable.
            RuntimeStateError: the runtime is closed or was inherited through a fork.
            DeviceFaultError: the context is lost.
        """
        if _thread.capturing not in (None, self):
            raise _spoils_capture(operation)
        with self.lock:
            self.check_usable()
            if self.captures_here and not in_capture:
                raise _spoils_capture(operation)
            with self.current():
                yield self.driver

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context current on this thread, a device fault recorded, and the caller's context back.

        A thread that has no context keeps this one, as with the CUDA runtime API.
        """
        try:
            present = self.driver.ctx_get_current()
            if present != self.context:
                self.driver.ctx_push_current(self.context)
            try:
                yield
            finally:
                if present not in (0, self.context):
                    self.driver.ctx_pop_current()
        except DriverError as error:
            # A context that is destroyed while it is current here is this one.
            if isinstance(error, DeviceFaultError) or error.name == _CONTEXT_DESTROYED:
                raise self.poison(error) from error.__cause__  # what a kernel in Python raised
            raise

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Use what the end of the runtime destroys, events and host buffers, without the lock, which nobody waits for.

        Raises:
            RuntimeStateError: the runtime is being closed.
        """
        entry = (get_ident(), object())
        # Whoever closes sets the flag and then looks for entries: one of the two sees the other.
        self._outside.add(entry)
        try:
            if self._is_closing:
                raise RuntimeStateError("another thread has closed the runtime during this call; nothing is returned")
            yield
        finally:
            self._outside.discard(entry)

    def end_outside(self) -> None:
        """Let no thread in :meth:`outside` any more, and wait for those that are; all work is done, the lock held."""
        self._is_closing = True
        # A signal handler that closes may have interrupted one on its own thread, which goes on only after it.
        while any(thread != get_ident() for thread, _ in list(self._outside)):
            sleep(_PASSING)

    def enqueue(self, call: Callable[..., None], *arguments: object) -> None:
        """Make one call that puts work on the compute stream; the lock is held.

        The context is nearly always current, and asking the driver costs as much as a third of a graph
        launch. So the call is made, and only if the driver misses its context made again with it. In a
        capture a failed call would spoil the graph: there the context is made current first.
        """
        if self.capturing:
            with self.current():
                call(*arguments)
            return
        try:
            call(*arguments)
        except DriverError as error:
            self.retry(error, call, *arguments)

    def retry(self, error: DriverError, call: Callable[..., None], *arguments: object) -> None:
        """Make a call that failed with ``error`` again, with the context current, if that was all it missed."""
        if isinstance(error, DeviceFaultError):
            raise self.poison(error) from error.__cause__  # what a kernel in Python raised
        if error.name not in _CONTEXT_MISSING:
            raise error
        with self.current():
            call(*arguments)

    def traced(
        self, kind: str, name: str, details: Mapping[str, object], stream: int | None = None
    ) -> AbstractContextManager[object]:
        """A span of the open trace, around a call or around work that it puts on ``stream``; without one, nothing."""
        tracer = self.tracer
        return _UNTRACED if tracer is None else tracer.span(Activity(kind, name, details), stream)

    @property
    def captures_here(self) -> bool:
        """Whether the calling thread has a capture open on this runtime; waits for nobody."""
        return _thread.capturing is self

    def enter_capture(self) -> None:
        """The calling thread, which holds the lock, has opened a capture."""
        self.capturing = True
        self.lock.close_short_way("capture")
        self.lock.capturer = threading.current_thread()
        _thread.capturing = self
        _capturing.add(self)
        # Nor has this thread a short way on any other runtime: there its calls are refused.
        with _sessions.lock:
            turns = [session.lock.turn for session in _sessions.known]
        for turn in turns:
            if turn.owner == get_ident():
                turn.owner = 0

    def leave_capture(self) -> None:
        """The calling thread's capture has ended."""
        self.capturing = False
        self.lock.close_short_way("capture", False)
        self.lock.capturer = None
        _thread.capturing = None
        _capturing.discard(self)

    def mark(self) -> _Mark:
        """A place behind the work enqueued so far, for :meth:`settle`."""
        mark = _Mark()
        self.suspects.append(mark)
        return mark

    def settle(self, mark: _Mark) -> None:
        """The work enqueued before ``mark`` is done without a fault."""
        if mark in self.suspects:
            while self.suspects.popleft() is not mark:
                pass

    def collect(self) -> None:
        """Make the calls that finalisers asked for; the lock is held and no capture is open.

        One that fails is tried again the next time, and is no error of the caller's from then on: what the driver
        never takes back does not keep everything after it from being released.
        """
        failures = 0
        while len(self.dropped) > failures:
            release = self.dropped[0]
            try:
                release()
            except DeviceFaultError:
                raise
            except DriverError as error:
                if release not in self._failing:
                    self._failing.add(release)
                    raise
                # As text: a handler that keeps the error would keep what the caller's frames refer to.
                logger.warning("what was dropped cannot be released yet: %s", str(error))
                self.dropped.rotate(-1)
                failures += 1
            else:
                self._failing.discard(release)
                self.dropped.popleft()

    def check_usable(self) -> None:
        if self.refusal is not None:
            raise self.refusal()

    def refuse(self, message: str) -> None:
        """Refuse every later call with ``message``."""
        self._refuse(lambda: RuntimeStateError(message))

    def _refuse(self, refusal: Callable[[], NxrtError]) -> None:
        self._refusal = refusal
        self.lock.close_short_way("refusal")

    def poison(self, fault: DriverError) -> NxrtError:
        """Record the first fault of the context; what every later call raises."""
        if self._refusal is None:
            # Of a copy, made at once: whoever only waits holds no lock, and other threads go on launching.
            suspects = tuple([label for label in list(self.suspects) if isinstance(label, str)][-_SUSPECTS:])
            known = f"{fault.context}; " if fault.context else ""
            blame = f"launched since the last good synchronise: {', '.join(suspects)}; " if suspects else ""

            def refusal() -> DeviceFaultError:
                return DeviceFaultError(
                    fault.call,
                    fault.code,
                    fault.name,
                    fault.text,
                    f"{known}{blame}the CUDA context is lost, restart the process",
                    suspects,
                )

            self._refuse(refusal)
            logger.error("%s", refusal())
            return refusal()
        return self._refusal()


def _spoils_capture(operation: str) -> CaptureError:
    return CaptureError(
        f"{operation} is illegal while this thread captures a CUDA graph; do it before the capture",
        operation=operation,
        state="capturing",
    )


class _Sessions:
    """The sessions of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: weakref.WeakSet[Session] = weakref.WeakSet()


_sessions = _Sessions()


def _refuse_after_fork() -> None:
    PrimaryContext._lock = threading.RLock()
    _sessions.lock = threading.Lock()
    _thread.capturing = None
    _capturing.clear()
    for session in _sessions.known:
        # The parent's thread may have held the lock; this child owns nothing that it guards, and has no turn.
        session.lock.turn = _Turn(0)
        session.lock = _Gate()
        session.capturing = False
        session.refuse(
            "this runtime was inherited through fork, and CUDA does not survive a fork; "
            "start workers with multiprocessing's 'spawn' method and open the runtime there"
        )


os.register_at_fork(after_in_child=_refuse_after_fork)
