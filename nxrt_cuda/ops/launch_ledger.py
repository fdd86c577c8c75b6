"""How often kernel objects were executed and what that launched: each object for itself, and all of an operator's.

An execution raises one number, of its plan's :class:`Tally`; sums are made when somebody asks.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from operator import add, sub
from typing import Generic, TypeVar

__all__ = ["LaunchLedger", "Tally"]

Choice = TypeVar("Choice")

_Counts = tuple[int, ...]
"""Executions, then launches of each kind."""


class Tally(Generic[Choice]):
    """The executions of one plan; made by :meth:`LaunchLedger.open`.

    Attributes:
        choice: the variant that the plan is of, and why.
        grids: for each kind of launch, the blocks of those of one execution that launch anything.
        executions: how many there were; raised with the runtime's lock held.
    """

    __slots__ = ("__weakref__", "_closed", "choice", "executions", "grids")

    def __init__(self, choice: Choice, grids: tuple[tuple[int, ...], ...], closed: tuple[deque[_Counts], ...]) -> None:
        self.choice = choice
        self.grids = grids
        self.executions = 0
        self._closed = closed

    @property
    def counts(self) -> _Counts:
        return (self.executions, *(self.executions * len(kind) for kind in self.grids))

    def __del__(self) -> None:
        # Python's collector may be the caller, at any instruction: what is open is only queued.
        for queue in self._closed:
            queue.append(self.counts)


class LaunchLedger(Generic[Choice]):
    """Counts executions of plans; what a child counts, its parent counts too. Any thread may ask.

    Args:
        kinds: how many kinds of launches are told apart.
        parent: the ledger of the whole process.

    Attributes:
        kinds: as given.
        last: of the latest execution; None before the first.
    """

    def __init__(self, kinds: int, parent: LaunchLedger[Choice] | None = None) -> None:
        self.kinds = kinds
        self.last: Tally[Choice] | None = None
        self._parent = parent
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Tally[Choice]] = weakref.WeakSet()
        # Of plans that are gone: those that were not added up yet, and the sum of the others since the last reset.
        self._closed: deque[_Counts] = deque()
        self._sum: _Counts = (0,) * (1 + kinds)
        self._last_grids = (0,) * kinds

    def open(self, choice: Choice, *grids: tuple[int, ...]) -> Tally[Choice]:
        """A tally for a new plan."""
        ledgers = (self,) if self._parent is None else (self, self._parent)
        tally = Tally(choice, grids, tuple(ledger._closed for ledger in ledgers))
        for ledger in ledgers:
            with ledger._lock:
                ledger._open.add(tally)
                ledger._add_closed()
        return tally

    def executed(self, tally: Tally[Choice]) -> None:
        """The plan of ``tally`` was the last to be executed; to be told where :attr:`last` is another."""
        with self._lock:
            self.last = tally
            self._last_grids = tuple(
                kind[-1] if kind else before for kind, before in zip(tally.grids, self._last_grids, strict=True)
            )
        if self._parent is not None:
            self._parent.executed(tally)

    def totals(self) -> tuple[_Counts, tuple[int, ...], Choice | None]:
        """Executions and launches of each kind; blocks of the latest launch of each kind; the latest choice."""
        with self._lock:
            return self._count(), self._last_grids, None if self.last is None else self.last.choice

    def reset(self) -> None:
        """Count from zero; a parent's children go on counting."""
        with self._lock:
            counts = self._count()
            self._sum = tuple(map(sub, self._sum, counts))
            self._last_grids = (0,) * len(self._last_grids)
            self.last = None

    def _count(self) -> _Counts:
        # Those that are open first: one that is closed meanwhile is then in this list, and not yet in the queue.
        tallies = list(self._open)
        self._add_closed()
        counts = self._sum
        for tally in tallies:
            counts = tuple(map(add, counts, tally.counts))
        return counts

    def _add_closed(self) -> None:
        while self._closed:
            self._sum = tuple(map(add, self._sum, self._closed.popleft()))
