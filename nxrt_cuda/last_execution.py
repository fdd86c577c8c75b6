"""The short way of an execution that does what the one before it did."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from nxrt_cuda.context import Session
from nxrt_cuda.errors import DriverError
from nxrt_cuda.launch import PreparedLaunch
from nxrt_cuda.stats import RuntimeCounters

if TYPE_CHECKING:
    from nxrt_cuda.tensor import TensorView

__all__ = ["LastExecution"]


class _Counted(Protocol):
    """What is counted with every execution."""

    executions: int


Tally = TypeVar("Tally", bound=_Counted)


class LastExecution(Generic[Tally]):
    """The latest execution of a kernel object, to be made again where the operands are the very same.

    Views are immutable: the same objects have the same addresses and layouts, so that the launches are packed as
    they have to be, and only memory may have been freed since. The views are not kept alive.
    """

    __slots__ = ("_counters", "_dropped", "_frees", "_launches", "_output", "_references", "_session", "_tally")

    _tally: Tally

    def __init__(self, session: Session, counters: RuntimeCounters) -> None:
        self._session = session
        self._counters = counters
        self._output: Callable[[], Any] = _nothing
        self._references: list[Callable[[], Any]] = []
        self._dropped: list[object] = []
        self._launches: tuple[PreparedLaunch, ...] = ()
        self.forget()

    def again(self, operands: list[TensorView | None]) -> Tally | None:
        """Make the launches again if these are their operands; the tally that counts it, or None if they are not.

        Also None, with nothing launched, where the runtime is doing something that asks for more than launches.

        Raises:
            DriverError: the driver refused one.
        """
        if self._output() is not operands[-1]:  # asked first: a new one is told apart at once
            return None
        session = self._session
        gate = session.lock
        turn = gate.turn
        if turn.owner != get_ident():
            return None
        turn.passing = True
        try:
            if (
                gate.turn is not turn
                or self._frees != session.frees
                or self._dropped  # an operand that is gone looks like one that is absent
                or [reference() for reference in self._references] != operands
            ):
                return None
            for launch in self._launches:
                start = launch.start
                try:
                    (status,) = start.call()
                    if status:
                        raise start.error(status)
                except DriverError as error:
                    session.retry(error, start)
                self._counters.launches += 1
                session.suspects.append(launch.label)
            tally = self._tally
            tally.executions += 1
            return tally
        finally:
            turn.passing = False

    def remember(self, operands: list[TensorView | None], launches: tuple[PreparedLaunch, ...], tally: Tally) -> None:
        """``operands`` were checked and ``launches`` made, all with a grid that launches anything; the lock is held."""
        if self._output() is not operands[-1]:
            # Where every execution has an output of its own, the others would be noted for nothing.
            self._output = weakref.ref(operands[-1])
            return
        self._dropped = []
        note = self._dropped.append
        self._references = [_nothing if view is None else weakref.ref(view, note) for view in operands]
        self._frees = self._session.frees
        self._launches = launches
        self._tally = tally

    def forget(self) -> None:
        """There is nothing to make again until the next :meth:`remember`."""
        self._frees = -1


def _nothing() -> None:
    return None
