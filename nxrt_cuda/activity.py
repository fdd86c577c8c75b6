"""What a piece of work is called in traces and in pictures of graphs, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Activity"]


@dataclass(frozen=True, slots=True)
class Activity:
    """One piece of work, on a stream or on the host.

    Attributes:
        kind: ``"kernel"``, ``"memcpy"``, ``"memset"`` or ``"graph"`` for what runs on a stream;
            ``"capture"``, ``"compile"``, ``"load"`` or ``"synchronize"`` for what only the host does.
        name: for people: ``"Attention: flash_attention_f16"``, ``"memcpy HtoD"``.
        details: what else is known of it: grid, block, bytes.
    """

    kind: str
    name: str
    details: Mapping[str, object] = field(default_factory=dict)
