"""The short way of an execution: where its launches were made before, it has addresses to renew and nothing else."""

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

__all__ = ["PlannedLaunches", "ShortWay"]


class _Counted(Protocol):
    """What is counted with every execution."""

    executions: int


Tally_co = TypeVar("Tally_co", bound=_Counted, covariant=True)


class PlannedLaunches(Protocol[Tally_co]):
    """What a kernel object keeps for operands of one layout.

    Attributes:
        launches: what an execution launches, once one has gone through the long way; empty before, and where one of
            them launches nothing.
        tally: counts the executions.
    """

    launches: tuple[PreparedLaunch, ...]

    @property
    def tally(self) -> Tally_co: ...


class ShortWay(Generic[Tally_co]):
    """The executions of a kernel object for which the runtime has to do nothing but launch.

    The latest one is remembered: where the operands are the very same, their addresses are those that the launches
    have. Views are immutable: the same objects have the same addresses and layouts, and only memory may have been
    freed since. They are not kept alive.
    """

    __slots__ = ("_counters", "_dropped", "_frees", "_output", "_plan", "_references", "_session")

    _plan: PlannedLaunches[Tally_co]

    def __init__(self, session: Session, counters: RuntimeCounters) -> None:
        self._session = session
        self._counters = counters
        # The identity of the latest output. Another one may have it by now, which is noted for nothing then.
        self._output = 0
        self._references: list[Callable[[], Any]] = []
        self._dropped: list[object] = []
        # How many frees the session had seen when the operands were noted; -1 where none are.
        self._frees = -1

    def execute(
        self,
        operands: list[TensorView | None],
        bind: Callable[[list[TensorView | None]], PlannedLaunches[Tally_co] | None],
    ) -> Tally_co | None:
        """Make the launches for ``operands``, the last of which is the output; returns the tally that counts them.

        ``bind`` checks the operands and renews the addresses in the launches for their layout, or returns None if
        there are none. It must not take the runtime's lock.

        Returns None, with nothing launched, where ``bind`` does, or where the runtime is doing something that asks for
        more than launches.

        Raises:
            DriverError: the driver refused a launch; and what ``bind`` raises.
        """
        session = self._session
        gate = session.lock
        turn = gate.turn
        if turn.owner != get_ident():
            return None
        turn.passing = True
        try:
            if gate.turn is not turn:
                return None
            if (
                self._frees != session.frees
                or self._output != id(operands[-1])
                or self._dropped  # an operand that is gone looks like one that is absent
                or [reference() for reference in self._references] != operands
            ):
                self._frees = -1
                plan = bind(operands)
                if plan is None:
                    return None
                self.remember(operands, plan)
            else:
                plan = self._plan
            for launch in plan.launches:
                start = launch.start
                try:
                    (status,) = start.call()
                    if status:
                        raise start.error(status)
                except DriverError as error:
                    session.retry(error, start)
                self._counters.launches += 1
                session.suspects.append(launch.label)
            tally = plan.tally
            tally.executions += 1
            return tally
        finally:
            turn.passing = False

    def remember(self, operands: list[TensorView | None], plan: PlannedLaunches[Tally_co]) -> None:
        """The launches of ``plan`` are those for ``operands``, which were checked."""
        if self._output != id(operands[-1]):
            # Where every execution has an output of its own, the operands would be noted for nothing.
            self._output = id(operands[-1])
            return
        self._dropped = []
        note = self._dropped.append
        self._references = [_nothing if view is None else weakref.ref(view, note) for view in operands]
        self._frees = self._session.frees
        self._plan = plan

    def forget(self) -> None:
        """Addresses are renewed: none are known until the next :meth:`remember`."""
        self._frees = -1


def _nothing() -> None:
    return None
