"""The plan of one bucket: the metadata of every tensor, where each lies, and which outputs are cropped.

Pure: nothing is allocated or compiled, and every refusal comes from here or before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nxrt_cuda.engine.arena import Lifetime, place
from nxrt_cuda.engine.wiring import Step, operator_name
from nxrt_cuda.errors import EngineError, UnsupportedError
from nxrt_cuda.kernel import kernel_factory, unsupported_reason
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["BucketPlan", "plan_bucket"]

Metadata = dict[str, TensorMetadata]


@dataclass(frozen=True)
class BucketPlan:
    """What one combination of symbol sizes needs.

    Attributes:
        metadata: of every tensor by name.
        offsets: bytes from the start of the arena, of every tensor that is not bound.
        nbytes: of the arena.
        nbytes_without_reuse: what separate buffers would take.
        padded: the symbol at axis 0 of each input and output that the bucket may be larger than.
    """

    metadata: Mapping[str, TensorMetadata]
    offsets: Mapping[str, int]
    nbytes: int
    nbytes_without_reuse: int
    padded: Mapping[str, str]


def plan_bucket(
    steps: Sequence[Step],
    inputs: Mapping[str, TensorMetadata],
    bound: Mapping[str, TensorMetadata],
    outputs: Collection[str],
    padded: Mapping[str, str],
) -> BucketPlan:
    """Plan ``steps`` for inputs and bound tensors of known shapes.

    Args:
        steps: in an order that runs.
        inputs: given by each call; they keep their memory through the whole sequence.
        bound: in memory of their own.
        outputs: kept to the end of the sequence.
        padded: the symbol at axis 0 of each input and bound tensor whose batch may be padded.

    Raises:
        UnsupportedError: a kernel does not serve these shapes, or would mix what is padded with what is not.
    """
    metadata = _infer(steps, {**inputs, **bound})
    lifetimes = [*_lifetimes(steps, inputs, outputs, metadata)]
    offsets, nbytes = place(lifetimes)
    return BucketPlan(
        metadata, offsets, nbytes, sum(buffer.footprint for buffer in lifetimes), _padding(steps, metadata, padded)
    )


def _infer(steps: Sequence[Step], known: Mapping[str, TensorMetadata]) -> Metadata:
    """The metadata of every tensor. All steps that can be judged are, before any refusal is raised."""
    metadata = dict(known)
    problems = []
    for step in steps:
        if any(name not in metadata for name in step.present_inputs):
            continue  # behind a step that is refused
        operands = [metadata[name] if name else None for name in step.inputs]
        reason = unsupported_reason(
            step.node,
            [None if operand is None else operand.shape for operand in operands],
            [None if operand is None else operand.dtype for operand in operands],
        )
        if reason is not None:
            problems.append(f"{step.label} ({operator_name(step.node)}): {reason}")
            continue
        results = kernel_factory(step.node).output_metadata(step.node, operands)
        if len(results) != len(step.outputs):
            raise EngineError(f"{step.label} has {len(results)} output(s), and {len(step.outputs)} name(s) for them")
        metadata.update(zip(step.outputs, results, strict=True))
    if problems:
        raise UnsupportedError(f"no kernel serves {'; '.join(problems)}")
    return metadata


def _lifetimes(
    steps: Sequence[Step], inputs: Collection[str], outputs: Collection[str], metadata: Metadata
) -> Iterator[Lifetime]:
    end = len(steps)
    last = {name: index for index, step in enumerate(steps) for name in step.inputs}
    last.update(dict.fromkeys(outputs, end))
    for name in inputs:
        yield Lifetime(name, metadata[name].nbytes, 0, end)
    for index, step in enumerate(steps):
        for name in step.outputs:
            yield Lifetime(name, metadata[name].nbytes, index, last[name])


def _padding(steps: Sequence[Step], metadata: Metadata, padded: Mapping[str, str]) -> dict[str, str]:
    """Carry the padded symbols from the inputs through to the outputs.

    Raises:
        UnsupportedError: a step's result for the true rows would depend on the padded ones.
    """
    carried = dict(padded)
    for step in steps:
        symbols = {carried[name] for name in step.present_inputs if name in carried}
        if not symbols:
            continue
        operands = [metadata[name] if name else None for name in step.inputs]
        batched = kernel_factory(step.node).batch_inputs(step.node, operands)
        for position, (name, operand) in enumerate(zip(step.inputs, operands, strict=True)):
            if name in carried and position not in batched:
                raise UnsupportedError(
                    f"'{carried[name]}' cannot have bucket sizes: {step.label} ({operator_name(step.node)}) does not "
                    f"treat axis 0 of '{name}' as a batch"
                )
            if operand is not None and name not in carried and position in batched and operand.shape[0] != 1:
                raise UnsupportedError(
                    f"{' and '.join(sorted(symbols))} cannot have bucket sizes: {step.label} reads a batch of "
                    f"{operand.shape[0]} from '{name}' beside the padded one"
                )
        if len(symbols) > 1:
            listed = ", ".join(sorted(symbols))
            raise UnsupportedError(f"{step.label} reads batches padded by different symbols: {listed}")
        carried.update(dict.fromkeys(step.outputs, symbols.pop()))
    return carried
