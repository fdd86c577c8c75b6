"""The nodes of an engine, connected by the names of their tensors: checked, and put in an order that runs."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nxrt_cuda.errors import EngineError, UnsupportedError
from nxrt_cuda.kernel import kernel_factory, registered_ops
from nxrt_cuda.node import Node

__all__ = ["Step", "operator_name", "refuse_unknown_operators", "wire"]


@dataclass(frozen=True)
class Step:
    """One node between its tensors.

    Attributes:
        node: what to compute.
        inputs: names of its inputs; ``""`` is an absent one.
        outputs: names of its outputs.
        label: the node's own name, or its operator and its position in the list.
    """

    node: Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str

    @property
    def present_inputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if name)


def operator_name(node: Node) -> str:
    """``domain::op_type``."""
    return f"{node.domain or 'ai.onnx'}::{node.op_type}"


def wire(nodes: Iterable[Any], sources: Collection[str], outputs: Sequence[str]) -> tuple[Step, ...]:
    """The nodes in an order in which every tensor is produced before it is read; as given where that is one.

    Args:
        nodes: (node, input names, output names) each; ``""`` or None is an absent input.
        sources: names that are there without a node: inputs and bound tensors.
        outputs: names that must be produced.

    Raises:
        EngineError: a name is undefined, produced twice or used by nobody, or nodes depend on each other in
            a circle. Everything that is wrong is named.
    """
    if isinstance(outputs, str):
        raise EngineError(f"outputs is {outputs!r}; give a list of names")
    steps = [_step(index, entry) for index, entry in enumerate(nodes)]
    problems = [*_misnamed(steps, sources, outputs)]
    ordered = _in_order(steps)
    if len(ordered) < len(steps):
        stuck = ", ".join(step.label for step in steps if step not in ordered)
        problems.append(f"there is a circle through, or before, {stuck}")
    if problems:
        raise EngineError(f"the engine's nodes do not fit together: {'; '.join(problems)}")
    return tuple(ordered)


def refuse_unknown_operators(nodes: Iterable[Node]) -> None:
    """Raise one :class:`UnsupportedError` that names every operator without a kernel."""
    unknown: dict[str, None] = {}
    for node in nodes:
        try:
            kernel_factory(node)
        except UnsupportedError:
            unknown[operator_name(node)] = None
    if unknown:
        served = ", ".join(operator_name(Node(op, domain)) for domain, op in registered_ops())
        raise UnsupportedError(f"no kernel for {', '.join(unknown)}; there are kernels for {served}")


def _step(index: int, entry: Any) -> Step:
    try:
        node, inputs, outputs = entry
    except (TypeError, ValueError):
        raise EngineError(f"node {index} is {entry!r}; give (Node, input names, output names)") from None
    if not isinstance(node, Node) or isinstance(inputs, str) or isinstance(outputs, str):
        raise EngineError(f"node {index} is {entry!r}; give (Node, [input names], [output names])")
    label = node.name or f"{node.op_type} {index}"
    return Step(node, tuple(name or "" for name in inputs), tuple(outputs), label)


def _misnamed(steps: Sequence[Step], sources: Collection[str], outputs: Sequence[str]) -> Iterable[str]:
    produced = Counter(name for step in steps for name in step.outputs)
    used = {name for step in steps for name in step.inputs} | set(outputs)
    for step in steps:
        for position, name in enumerate(step.inputs):
            if name and name not in produced and name not in sources:
                yield f"'{name}', input {position} of {step.label}, is undefined"
        if "" in step.outputs:
            yield f"{step.label} has an output without a name"
    for name, times in produced.items():
        if name in sources:
            yield f"'{name}' is given to the engine and produced by a node too"
        elif times > 1:
            yield f"'{name}' is produced {times} times"
        if name not in used and name:
            yield f"'{name}' is produced and not used"
    for name in sources:
        if name not in used:
            yield f"'{name}' is declared and not used"
    for name in outputs:
        if name not in produced:
            yield f"the output '{name}' is produced by no node"
    if not outputs:
        yield "there are no outputs"


def _in_order(steps: Sequence[Step]) -> list[Step]:
    """As many of ``steps`` as can run, each after those that it reads from, else in the order given."""
    producers = {name: index for index, step in enumerate(steps) for name in step.outputs}
    readers: dict[int, list[int]] = defaultdict(list)
    waiting = [0] * len(steps)
    for index, step in enumerate(steps):
        for producer in {producers[name] for name in step.present_inputs if name in producers}:
            readers[producer].append(index)
            waiting[index] += 1
    ready = [index for index, count in enumerate(waiting) if count == 0]
    ordered = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(steps[index])
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    return ordered
