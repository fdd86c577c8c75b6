"""Changing what a captured graph works on: checked as a whole, then given to the driver node by node.

A node's parameters are changed in its executable, which leaves replays under way alone. Where the driver refuses
that for a node, the whole graph is brought up to date at once; if that is refused too, what was changed is
changed back, so that replays go on as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxrt_cuda.driver.base import Driver
from nxrt_cuda.errors import DeviceFaultError, DeviceMemoryError, DriverError, GraphError, TensorError
from nxrt_cuda.segment import LaunchWork, Node, Segment
from nxrt_cuda.tensor import TensorMut, TensorView

__all__ = ["HalfRebound", "rebind"]

_WIDEST_ACCESS = 32
"""Bytes that one thread moves at most, on any architecture; no kernel is specialised by a larger alignment."""


class HalfRebound(GraphError):
    """An update failed, and so did undoing it: the executable must not run any more."""


def rebind(
    name: str,
    segments: Sequence[Segment],
    tensors: Mapping[TensorView, TensorView],
    scalars: Mapping[tuple[int | str, str], Any],
    driver: Driver,
    context: int,
) -> None:
    """Do what ``CapturedGraph.rebind`` says, to the graph ``name``, with the context current.

    Raises:
        HalfRebound: the driver failed half-way, and again when that was to be undone.
    """
    update = _Update(name, segments, driver, context)
    update.replace_tensors(tensors)
    update.set_scalars(scalars)
    update.make()


class _Move:
    """One tensor in the place of another: the bytes of the old one, and how far they move."""

    __slots__ = ("distance", "new", "old")

    def __init__(self, old: TensorView, new: TensorView) -> None:
        self.old = old
        self.new = new
        self.distance = new.ptr - old.ptr

    def place(self, view: TensorView) -> TensorView:
        """The part of the new tensor that ``view``, which lies in the old one, becomes."""
        if view.ptr == self.old.ptr and view.metadata == self.old.metadata:
            return self.new
        return type(view)(view.ptr + self.distance, view.metadata, self.new.owner)


@dataclass
class _Change:
    """What is to become of one node."""

    segment: Segment
    node: Node
    moves: list[_Move] = field(default_factory=list)
    scalars: dict[int, Any] = field(default_factory=dict)
    operands: tuple[TensorView, ...] = ()
    addresses: tuple[int, ...] = ()


class _Update:
    """The changes of one call, by node."""

    def __init__(self, name: str, segments: Sequence[Segment], driver: Driver, context: int) -> None:
        self._name = name
        self._segments = segments
        self._driver = driver
        self._context = context
        self._changes: dict[Node, _Change] = {}

    # Checks. Nothing is changed before all have passed.

    def replace_tensors(self, tensors: Mapping[TensorView, TensorView]) -> None:
        if not isinstance(tensors, Mapping):
            raise TensorError(f"cannot rebind {self._name}: give {{old: new}}, got a {type(tensors).__name__}")
        for view in (*tensors.keys(), *tensors.values()):
            if not isinstance(view, TensorView):
                raise TensorError(
                    f"cannot rebind {self._name}: expected tensors of this package, got {type(view).__name__}"
                )
        moves = [_Move(old, new) for old, new in tensors.items() if new is not old]
        for position, move in enumerate(moves):
            self._check_fit(move)
            for other in moves[:position]:
                if _overlap(move.old, other.old):
                    raise self._refused(f"{other.old!r} and {move.old!r}, both to be replaced, overlap")
            for segment in self._segments:
                for node in segment.owners.get(move.old.owner, ()):
                    self._change(segment, node).moves.append(move)
        used: set[_Move] = set()
        for change in self._changes.values():
            used |= self._move(change)
        for move in moves:
            if move not in used:
                raise self._refused(f"no kernel, copy or fill in it uses {move.old!r}")

    def _check_fit(self, move: _Move) -> None:
        old, new = move.old, move.new
        if new.owner.runtime is not old.owner.runtime:
            raise DeviceMemoryError(f"{new!r} belongs to another runtime than {old!r}, which it is to replace")
        if new.owner.is_freed:
            raise DeviceMemoryError(f"{new!r} was {new.owner.fate}; it cannot replace {old!r} in {self._name}")
        if new.metadata != old.metadata:
            what = next(name for name in ("dtype", "shape", "strides") if getattr(old, name) != getattr(new, name))
            raise self._refused(
                f"{what} {getattr(new, what)} of {new!r} is not {getattr(old, what)}, that of {old!r}; grids and "
                "layouts are fixed when a graph is recorded, so capture again"
            )
        if isinstance(old, TensorMut) and not isinstance(new, TensorMut):
            raise self._refused(f"{new!r} is read-only, and {old!r} may be written to")

    def _move(self, change: _Change) -> set[_Move]:
        """Work out the new operands and addresses of a node; returns the tensors that it really uses."""
        node, used = change.node, set()
        addresses = list(node.work.addresses)
        for index, address in enumerate(node.work.addresses):
            for move in change.moves:
                if move.old.ptr <= address < move.old.end:
                    addresses[index] = moved = address + move.distance
                    self._check_alignment(node, move, address, moved)
                    used.add(move)
        operands = [self._place(node, view, change.moves) for view in node.operands]
        change.addresses, change.operands = tuple(addresses), tuple(operands)
        self._check_overlap(change)
        return used

    def _place(self, node: Node, view: TensorView, moves: Iterable[_Move]) -> TensorView:
        for move in moves:
            if move.old.ptr <= view.ptr < move.old.end and view.end <= move.old.end:
                return move.place(view)
            if _overlap(view, move.old):
                raise self._refused(f"{node.label} uses {view!r}, of which {move.old!r} is a part; replace the whole")
        return view

    def _check_alignment(self, node: Node, move: _Move, before: int, after: int) -> None:
        alignment = (before | _WIDEST_ACCESS) & -(before | _WIDEST_ACCESS)
        if after % alignment:
            raise self._refused(
                f"{move.new!r} is less aligned than {move.old!r}: {node.label} was chosen for an address that is a "
                f"multiple of {alignment} bytes, and gets 0x{after:x}"
            )

    def _check_overlap(self, change: _Change) -> None:
        """A kernel may count on its operands being apart; the runtime does not know which of them it writes."""
        before, after = change.node.operands, change.operands
        for index, view in enumerate(after):
            if view is before[index]:
                continue
            for other_index, other in enumerate(after):
                if (
                    other_index != index
                    and (isinstance(view, TensorMut) or isinstance(other, TensorMut))
                    and _overlap(view, other)
                    and not _overlap(before[index], before[other_index])
                ):
                    raise self._refused(
                        f"{view!r} overlaps {other!r} in {change.node.label}, which was recorded with tensors apart"
                    )

    def set_scalars(self, scalars: Mapping[tuple[int | str, str], Any]) -> None:
        for key, value in scalars.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise self._refused(f"a number is named by (launch, parameter), not by {key!r}")
            launch, parameter = key
            for segment, node in self._launches(launch):
                work = node.work
                assert isinstance(work, LaunchWork)
                spec = work.launch.function.spec
                names = [param.name for param in spec.params]
                if parameter not in names:
                    raise self._refused(f"{spec.entry} has no parameter {parameter!r}; it has {', '.join(names)}")
                position = names.index(parameter)
                if spec.params[position].is_address:
                    raise self._refused(f"'{parameter}' of {spec.entry} is an address; give the tensor to replace")
                if spec.changeable is not None and parameter not in spec.changeable:
                    free = ", ".join(spec.changeable) or "none"
                    raise self._refused(
                        f"'{parameter}' of {spec.entry} belongs to what its operator has checked; numbers that may "
                        f"change: {free}. Record the graph again"
                    )
                self._change(segment, node).scalars[position] = value

    def _launches(self, launch: int | str) -> list[tuple[Segment, Node]]:
        """The kernels that an index in ``CapturedGraph.kernels``, or an entry, means."""
        found: list[tuple[Segment, Node]] = []
        for start, segment in self._enumerated():
            for node in segment.nodes:
                if isinstance(node.work, LaunchWork) and launch in (
                    start + node.position,
                    node.work.launch.function.spec.entry,
                ):
                    found.append((segment, node))
        if not found:
            kernels = [label for segment in self._segments for label in segment.kernels]
            what = f"number {launch}" if isinstance(launch, int) else f"of {launch!r}"
            raise self._refused(f"there is no launch {what}; it has {', '.join(kernels) or 'none'}")
        return found

    def _enumerated(self) -> Iterator[tuple[int, Segment]]:
        """The segments, each with the index of its first label."""
        start = 0
        for segment in self._segments:
            yield start, segment
            start += len(segment.kernels)

    def _change(self, segment: Segment, node: Node) -> _Change:
        change = self._changes.get(node)
        if change is None:
            change = _Change(segment, node, operands=node.operands, addresses=node.work.addresses)
            self._changes[node] = change
        return change

    # The update itself.

    def make(self) -> None:
        """Give all changes to the driver, or none."""
        changes = sorted(self._changes.values(), key=lambda change: change.node.position)
        states = [change.node.work.state for change in changes]
        try:
            for change in changes:
                self._write(change)
            self._update(changes, states)
        except BaseException:
            for change, state in zip(changes, states, strict=True):
                change.node.work.restore(state)
            raise
        for change in changes:
            change.segment.adopt(self._name, change.node, change.operands)

    def _write(self, change: _Change) -> None:
        node = change.node
        try:
            node.work.write(change.addresses, change.scalars)
        except DeviceFaultError:
            raise
        except DriverError as refusal:  # a tensor map that the driver does not make
            raise self._refused(f"node {node.position} ({node.label}): {refusal}") from refusal

    def _update(self, changes: Sequence[_Change], states: Sequence[Any]) -> None:
        """Update every node; after a failure, those that were are given back their ``states``."""
        done: list[_Change] = []
        for segment in self._segments:
            mine = [change for change in changes if change.segment is segment]
            try:
                for change in mine:
                    change.node.work.update(self._driver, segment.executable, change.node.handle, self._context)
                    done.append(change)
            except DeviceFaultError:
                raise
            except DriverError as refusal:
                try:
                    self._update_whole(segment)
                except DeviceFaultError:
                    raise
                except DriverError as second:
                    for other, state in zip(changes, states, strict=True):
                        other.node.work.restore(state)
                    problem = f"node {change.node.position} ({change.node.label}): {refusal}; at once: {second}"
                    self._undo(done, problem)
                    raise self._refused(problem) from refusal
                done += [change for change in mine if change not in done]

    def _update_whole(self, segment: Segment) -> None:
        """The other way to update an executable: from the graph that it was made from."""
        for node in segment.nodes:
            node.work.update_template(self._driver, node.handle, self._context)
        self._driver.graph_exec_update(segment.executable, segment.graph)

    def _undo(self, done: Iterable[_Change], problem: str) -> None:
        try:
            for change in done:
                change.node.work.update(self._driver, change.segment.executable, change.node.handle, self._context)
        except DeviceFaultError:
            raise
        except DriverError as failure:
            raise HalfRebound(
                f"cannot rebind {self._name}: {problem}; and undoing it failed: {failure}; capture it again"
            ) from failure

    def _refused(self, reason: str) -> GraphError:
        return GraphError(f"cannot rebind {self._name}: {reason}")


def _overlap(one: TensorView, other: TensorView) -> bool:
    return one.ptr < other.end and other.ptr < one.end
