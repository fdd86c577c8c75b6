"""The host driver's contexts: the primary one, those of others, and the stack each thread has of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from nxrt_cuda.driver.host_failure import Failure

__all__ = ["Contexts"]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[int] = []


class Contexts:
    """The primary context lives from its first retain to its last release; then a new one takes its place.

    Attributes:
        retained: how many retains have not been released.
    """

    def __init__(self, handles: Iterator[int]) -> None:
        self.retained = 0
        self._handles = handles
        self._primary = 0
        self._foreign: set[int] = set()
        self._stack = _Stack()

    def retain(self) -> int:
        if self.retained == 0:
            self._primary = next(self._handles)
        self.retained += 1
        return self._primary

    def release(self) -> None:
        if self.retained == 0:
            raise Failure("CUDA_ERROR_INVALID_CONTEXT", "the primary context is not retained")
        self.retained -= 1
        if self.retained == 0:
            self._primary = 0

    def add_foreign(self) -> int:
        """A context that is not the primary one."""
        context = next(self._handles)
        self._foreign.add(context)
        return context

    @property
    def current(self) -> int:
        """The calling thread's context; 0 where it has none."""
        return self._stack.contexts[-1] if self._stack.contexts else 0

    def push(self, context: int) -> None:
        if context == 0:
            raise Failure("CUDA_ERROR_INVALID_VALUE", "context 0 cannot be made current")
        if context != self._primary and context not in self._foreign:
            raise Failure("CUDA_ERROR_INVALID_CONTEXT", f"0x{context:x} is no live context")
        self._stack.contexts.append(context)

    def pop(self) -> int:
        if not self._stack.contexts:
            raise Failure("CUDA_ERROR_INVALID_CONTEXT", f"no context is current on {threading.current_thread().name}")
        return self._stack.contexts.pop()

    def require_same(self, context: int) -> None:
        """Refuse parameters of a node for another context than the current one."""
        current = self.current
        if context != current:
            raise Failure("CUDA_ERROR_INVALID_CONTEXT", f"context 0x{context:x} is given, 0x{current:x} is current")

    def require_primary(self) -> None:
        """Refuse a thread on which the primary context is not current."""
        current = self.current
        if current == 0:
            raise Failure("CUDA_ERROR_INVALID_CONTEXT", f"no context is current on {threading.current_thread().name}")
        if current in self._foreign:
            raise Failure("CUDA_ERROR_INVALID_CONTEXT", f"context 0x{current:x} is current, and not the primary one")
        if current != self._primary:
            raise Failure("CUDA_ERROR_CONTEXT_IS_DESTROYED", f"context 0x{current:x} was released for the last time")
