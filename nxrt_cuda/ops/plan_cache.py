"""The launches that a kernel object keeps prepared, by the layout that they are for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["PlanCache"]

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")

_LIMIT = 64


class PlanCache(Generic[Key, Plan]):
    """The 64 plans used last; decoding meets a new layout with every token."""

    def __init__(self) -> None:
        # The one used last is the last.
        self._plans: dict[Key, Plan] = {}
        self._last: tuple[Key | None, Plan | None] = None, None

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Key) -> Plan | None:
        """The plan kept under ``key``, which is now the one used last."""
        last, plan = self._last
        if key == last:  # which costs less than a hash where the parts are the same objects
            return plan
        plan = self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan
            self._last = key, plan
        return plan

    def keep(self, key: Key, plan: Plan) -> None:
        """Keep a plan that was not found, in place of the one not used for longest where there is no more room."""
        if len(self._plans) >= _LIMIT:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan
        self._last = key, plan
