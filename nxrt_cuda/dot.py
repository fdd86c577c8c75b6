"""A captured graph as a picture, in Graphviz's language: one box a node, one frame a segment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nxrt_cuda.activity import Activity

__all__ = ["SegmentPicture", "to_dot"]

_FILLS = {"kernel": "#d9ead3", "memcpy": "#cfe2f3", "memset": "#fff2cc"}
_FOREIGN_FILL = "#eeeeee"
_LABEL_WIDTH = 56

_HEADER = """\
  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10, margin="0.15,0.08"];
  edge [color="#555555"];
  fontname="Helvetica";"""


@dataclass(frozen=True)
class SegmentPicture:
    """What is drawn of one segment.

    Attributes:
        activities: the work that the runtime recorded, in the order of recording.
        node_types: the driver's types of all nodes; another library that worked on the captured stream has added
            those that the runtime does not know.
        arrows: which of ``activities`` come before which, by index.
    """

    activities: Sequence[Activity]
    node_types: Sequence[str]
    arrows: Sequence[tuple[int, int]] = ()


def to_dot(name: str, segments: Iterable[SegmentPicture]) -> str:
    """The text of a ``digraph``; arrows say what waits for what, and segments follow in the order of their replay."""
    lines = [f"digraph {_quoted(name)} {{", _HEADER, f"  label={_quoted(name)};"]
    last: str | None = None
    for number, segment in enumerate(segments):
        boxes = _boxes(segment)
        names = [f"s{number}n{position}" for position in range(len(boxes))]
        count = len(segment.node_types)
        lines += [
            f"  subgraph cluster_{number} {{",
            f"    label={_quoted(f'segment {number}: {count} node' + ('' if count == 1 else 's'))};",
            '    style=rounded; color="#888888";',
            *(
                f"    {node} [label={label}, fillcolor={_quoted(fill)}];"
                for node, (label, fill) in zip(names, boxes, strict=True)
            ),
        ]
        lines += [f"    {names[before]} -> {names[after]};" for before, after in segment.arrows]
        lines.append("  }")
        if names:
            if last is not None:
                lines.append(f"  {last} -> {names[0]} [style=dashed];")
            last = names[-1]
    return "\n".join([*lines, "}", ""])


def _boxes(segment: SegmentPicture) -> list[tuple[str, str]]:
    """Label and colour of every node."""
    boxes = [(_label(activity), _FILLS[activity.kind]) for activity in segment.activities]
    foreign = len(segment.node_types) - len(segment.activities)
    if foreign > 0:
        boxes.append((_quoted(f"{foreign} node(s) of other libraries"), _FOREIGN_FILL))
    return boxes


def _label(activity: Activity) -> str:
    details = activity.details
    lines = [activity.name]
    if activity.kind == "kernel":
        lines += textwrap.wrap(str(details["variant"]), _LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
        lines.append(f"grid {_extents(details['grid'])}, block {_extents(details['block'])}")
        lines.append(
            f"shared memory: {details['dynamic_shared_bytes']} bytes dynamic, "
            f"{details['static_shared_bytes']} bytes static"
        )
    else:
        lines.append(f"{details['bytes']} bytes")
    return _quoted("\n".join(lines))


def _extents(extents: object) -> str:
    assert isinstance(extents, tuple)
    return " x ".join(map(str, extents))


def _quoted(text: str) -> str:
    """``text`` as a DOT string; its lines are centred."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
