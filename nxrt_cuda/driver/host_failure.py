"""How a ``CUresult`` travels through the host driver to the edge of a call."""

from __future__ import annotations

from nxrt_cuda.driver.status import STATUSES
from nxrt_cuda.errors import DriverError

__all__ = ["Failure", "driver_error"]


class Failure(Exception):
    """A ``CUresult`` on its way out, before the name of the failing call is added to it."""

    def __init__(self, name: str, context: str) -> None:
        self.name = name
        self.context = context
        super().__init__(context)


def driver_error(call: str, failure: Failure) -> DriverError:
    """The typed error that ``call`` raises for ``failure``."""
    status = STATUSES[failure.name]
    return status.error(call, status.code, failure.name, status.text, failure.context)
