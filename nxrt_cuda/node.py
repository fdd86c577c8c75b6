"""An operator instance: its type, domain and attributes, and the readers that validate attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import numpy as np

from nxrt_cuda.errors import KernelError

__all__ = ["Node"]


@dataclass(frozen=True)
class Node:
    """One ONNX node: what to compute, without tensors.

    Attributes:
        op_type: the operator, e.g. ``"DsaIndexSelect"``.
        domain: its operator set, e.g. ``"pkg.nxrt"``; ``""`` is ``ai.onnx``.
        attributes: attribute values by name: int, float, str, or sequences of them.
        name: a label for reports.
    """

    op_type: str
    domain: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

    def __reduce__(self) -> tuple[object, ...]:
        """So that a node can be sent to a worker, which the view of its attributes alone could not."""
        return type(self), (self.op_type, self.domain, dict(self.attributes), self.name)

    def int_attr(self, name: str, default: int | None = None) -> int:
        """An integer attribute; required where there is no default."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self._error(f"missing required integer attribute '{name}'", name)
        if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
            raise self._error(f"attribute '{name}' must be an integer, got {value!r}", name)
        return int(value)

    def positive_int_attr(self, name: str, default: int | None = None) -> int:
        """An integer attribute greater than zero."""
        value = self.int_attr(name, default)
        if value <= 0:
            raise self._error(f"attribute '{name}' must be > 0, got {value}", name)
        return value

    def float_attr(self, name: str, default: float | None = None) -> float:
        """A float attribute, rounded to f32 as ONNX stores it; required where there is no default."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self._error(f"missing required float attribute '{name}'", name)
        if isinstance(value, bool | np.bool_ | Integral) or not isinstance(value, Real):
            raise self._error(f"attribute '{name}' must be a float, got {value!r}", name)
        with np.errstate(over="ignore"):
            return float(np.float32(value))

    def finite_positive_float_attr(self, name: str, default: float | None = None) -> float:
        """A float attribute that is finite and greater than zero, as f32."""
        value = self.float_attr(name, default)
        if not math.isfinite(value) or value <= 0.0:
            raise self._error(f"attribute '{name}' must be finite and > 0, got {value}", name)
        return value

    def reject_unknown_attributes(self, known: tuple[str, ...], what: str) -> None:
        """Refuse an attribute outside ``known``; ``what`` names the contract it is not part of."""
        for name in self.attributes:
            if name not in known:
                raise self._error(f"attribute '{name}' is not part of {what}", name)

    def _error(self, message: str, operand: str) -> KernelError:
        return KernelError(self.op_type, message, operand=operand)
