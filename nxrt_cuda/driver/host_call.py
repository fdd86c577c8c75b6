"""What all calls of the host driver have in common: the lock, the count, injected failures, and admission."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import count
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from nxrt_cuda.driver.base import Driver
from nxrt_cuda.driver.host_context import Contexts
from nxrt_cuda.driver.host_failure import Failure, driver_error
from nxrt_cuda.driver.host_graph import Captures
from nxrt_cuda.driver.host_stream import Executor
from nxrt_cuda.driver.status import STATUSES, is_fault

__all__ = ["HostCalls", "InjectedFailure", "driver_call"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HostCalls")


class InjectedFailure:
    """A call that is told to fail, once. Leaving its ``with`` block cancels it, if it is still to come.

    Attributes:
        error: the ``CUresult`` name it fails with.
        call: the method it waits for; None for any.
        fired: whether it has failed a call.
    """

    def __init__(self, n: int, error: str, call: str | None) -> None:
        self.error = error
        self.call = call
        self.fired = False
        self._remaining = n

    def meets(self, call: str) -> bool:
        """Count one call; whether it is the one to fail."""
        if self.call not in (None, call):
            return False
        self._remaining -= 1
        self.fired = self._remaining == 0
        return self.fired

    def cancel(self) -> None:
        """Let every further call be."""
        self._remaining = 0

    @property
    def is_pending(self) -> bool:
        return self._remaining > 0

    def __enter__(self) -> InjectedFailure:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class HostCalls:
    """The base of the host driver: everything that happens before and after the body of a call.

    Attributes:
        calls: how often each method was called, failed calls included.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._executor = Executor(self._lock)
        # One sequence for every kind, so that no handle is valid as another kind's.
        self._handles = count(0x1000)
        self._contexts = Contexts(self._handles)
        self._captures = Captures(self._handles)
        self._injected: list[InjectedFailure] = []

    @property
    def calls_total(self) -> int:
        """How many driver calls were made."""
        return self.calls.total()

    def fail_call(
        self, n: int = 1, error: str = "CUDA_ERROR_OUT_OF_MEMORY", call: str | None = None
    ) -> InjectedFailure:
        """Make the ``n``-th driver call from now fail with ``error``, before it does anything.

        Args:
            n: which call, from 1.
            error: the ``CUresult`` name; one that destroys the context does so here.
            call: count only calls of this method, e.g. ``"mem_alloc"``.
        """
        if n < 1:
            raise ValueError(f"n = {n}; the next call is 1")
        if error not in STATUSES:
            raise ValueError(f"unknown error {error!r}; there are {', '.join(STATUSES)}")
        if call is not None and call not in vars(Driver):
            raise ValueError(f"{call!r} is no driver call")
        failure = InjectedFailure(n, error, call)
        with self._lock:
            self._injected.append(failure)
        return failure

    def _admit(self, call: str, function: str, context: bool, unsafe: bool) -> None:
        self.calls[call] += 1
        due = [failure for failure in self._injected if failure.meets(call)]
        if due:
            self._injected = [failure for failure in self._injected if failure.is_pending]
            failure = Failure(due[0].error, "injected")
            if is_fault(failure.name):
                self._executor.lose(failure, function)
            raise failure
        if context:
            self._executor.check()
            self._contexts.require_primary()
        if unsafe:
            self._captures.refuse_unsafe(function)


def driver_call(
    function: str, *, context: bool = True, unsafe: bool = False, waits: bool = False
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """One driver call: what all have in common, around the body of the method.

    Args:
        function: the driver function it stands for, as errors name it.
        context: it needs a current context that no fault has ended.
        unsafe: it is "potentially unsafe" while a stream is capturing.
        waits: it may run queued work, so its body takes the lock by itself.
    """

    def decorate(body: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(body)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                with self._lock:
                    self._admit(body.__name__, function, context, unsafe)
                    if not waits:
                        result = body(self, *args, **kwargs)
                if waits:
                    result = body(self, *args, **kwargs)
                self._executor.relieve()
                return result
            except Failure as failure:
                raise driver_error(function, failure) from failure.__cause__

        return call

    return decorate
