"""Run a fixed sequence of kernels every step: planned, warmed and captured once, then replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxrt_cuda.engine.bucket import Bucket
from nxrt_cuda.engine.plan import BucketPlan, plan_bucket
from nxrt_cuda.engine.report import EngineReport
from nxrt_cuda.engine.signature import Declaration, Signature, Sizes
from nxrt_cuda.engine.wiring import refuse_unknown_operators, wire
from nxrt_cuda.errors import CaptureError, EngineError, RuntimeStateError
from nxrt_cuda.interop import host_array
from nxrt_cuda.node import Node
from nxrt_cuda.process_bound import ProcessBound
from nxrt_cuda.tensor import TensorMut, TensorView

if TYPE_CHECKING:
    from onnx import ModelProto

    from nxrt_cuda.runtime import CudaRuntime

__all__ = ["Engine"]


class Engine(ProcessBound):
    """A list of nodes between named tensors, replayed as a graph.

    .. code-block:: python

        engine = nx.Engine(
            rt,
            nodes=[(nx.Node("Attention", attributes={"is_causal": 1}), ["q", "k", "v"], ["y"])],
            inputs={"q": (nx.float16, ("B", 8, 64, 64)), "k": (nx.float16, ("B", 8, 64, 64)), ...},
            outputs=["y"],
        )
        engine.run({"q": q, "k": k, "v": v})["y"].numpy()

    The first call of each combination of symbol sizes builds a *bucket*: every operator says what its outputs
    are; inputs, intermediates and outputs get places in one arena, shared where their lives do not overlap;
    every kernel runs once on zeros, which compiles it and sizes its workspace; and the sequence is recorded,
    in segments around kernels that decline capture. A run then copies the inputs in and replays;
    :meth:`prepare` builds a bucket ahead of its first call, :meth:`report` says what was decided and why.

    Work is enqueued on the runtime's stream; nothing blocks. Any thread may call; one at a time is let in.

    Args:
        runtime: where to run.
        nodes: (node, input names, output names) each, in any order; ``""`` or None is an absent input.
        inputs: (dtype, shape) by name. A dimension is a number or a symbol such as ``"B"``, which the shapes of
            each call give a size.
        outputs: the names to return.
        bound: tensors used in place at their addresses, by name: weights, or caches that the caller updates
            between runs. An array is uploaded once. Where ``inputs`` declares the name, it may be larger than
            declared and each bucket sees its front, as ``narrow()`` cuts it.
        bucket_sizes: for a symbol of a batch at axis 0, the sizes to build buckets for, e.g. ``{"B": (1, 2, 4, 8)}``.
            A call uses the next larger one: its inputs fill the front rows, the others are zeros, and the outputs
            are cropped. Refused unless every operator on the way keeps the rows apart.
        max_bytes: bound on the buckets' device memory (arenas and workspaces). The least recently used are given
            up for a new one; the one in use never is, also when it exceeds the bound by itself.
        name: for reports and error messages.
        debug: whether an output is refused, wherever it is used, once a later run of its bucket has overwritten it.

    Raises:
        EngineError: the nodes, declarations or bound tensors do not fit together; everything wrong is named.
        UnsupportedError: operators without a kernel, all named; or, where no shape has a symbol, nodes that their
            kernels do not serve.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        nodes: Iterable[tuple[Node, Sequence[str | None], Sequence[str]]],
        inputs: Mapping[str, tuple[Any, Sequence[int | str]]],
        outputs: Sequence[str],
        *,
        bound: Mapping[str, Any] | None = None,
        bucket_sizes: Mapping[str, Sequence[int]] | None = None,
        max_bytes: int | None = None,
        name: str = "engine",
        debug: bool = False,
    ) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise EngineError(f"max_bytes = {max_bytes} is negative")
        bound = bound or {}
        self.name = name
        self._debug = debug
        self._runtime = runtime
        self._steps = wire(nodes, {**inputs, **bound}, outputs)
        self._outputs = tuple(outputs)
        refuse_unknown_operators(step.node for step in self._steps)
        self._signature = Signature(inputs, bound, bucket_sizes or {})
        self._bound = {
            label: value if isinstance(value, TensorView) else runtime.from_array(value)
            for label, value in bound.items()
        }
        self._max_bytes = max_bytes
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self._captures = self._replays = self._eager_runs = self._evictions = 0
        self._closed = False
        if not self._signature.symbols:
            self._plan({})

    @classmethod
    def from_onnx(
        cls,
        runtime: CudaRuntime,
        model: ModelProto | str | Path,
        *,
        bound: Mapping[str, Any] | None = None,
        bucket_sizes: Mapping[str, Sequence[int]] | None = None,
        max_bytes: int | None = None,
        name: str | None = None,
        debug: bool = False,
    ) -> Engine:
        """An engine of an ONNX model's nodes, inputs, outputs and initializers; needs the package ``onnx``.

        Served are ``pkg.nxrt::DsaIndexSelect``, ``ai.onnx::Attention`` and
        ``com.microsoft::GroupQueryAttention`` where they ask for what the kernels compute;
        :mod:`nxrt_cuda.engine.onnx_model` says where they do. Symbolic dimensions keep their names.

        Args:
            model: a model, or the path of one.
            bound, bucket_sizes, max_bytes, name, debug: as the constructor's; ``bound`` takes inputs of the model.

        Raises:
            UnsupportedError: nodes that are not served, all named, each with the reason; or no ``onnx`` here.
            EngineError: the file cannot be read as a model, or as the constructor raises.
        """
        from nxrt_cuda.engine.onnx_model import read_model

        graph = read_model(model)
        return cls(
            runtime,
            graph.nodes,
            graph.inputs,
            graph.outputs,
            bound={**graph.constants, **(bound or {})},
            bucket_sizes=bucket_sizes,
            max_bytes=max_bytes,
            name=name or graph.name,
            debug=debug,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def run(self, inputs: Mapping[str, Any], *, copy_outputs: bool = False) -> dict[str, TensorMut]:
        """Copy the inputs in, run the sequence, and return the outputs; enqueued, not awaited.

        Tensors of this runtime and device arrays of other libraries (CuPy, PyTorch) are copied on the device,
        all other arrays are uploaded, and cast as ``copy_from`` casts.

        The outputs are the engine's own memory: the next run of the same bucket overwrites them, and an engine with
        ``debug`` refuses them from then on. ``copy_outputs`` returns fresh tensors instead.

        Raises:
            EngineError: an input is missing, unknown or of a wrong shape, or they have no names; nothing has run.
            TensorError: an input's dtype does not fit, or it is strided.
            UnsupportedError: no kernel serves the shapes.
            CaptureError: this thread is capturing.
            RuntimeStateError: the engine is closed.
        """
        if not isinstance(inputs, Mapping):
            raise EngineError(f"inputs are given by name, in a dict; got a {type(inputs).__name__}")
        values = {name: value if hasattr(value, "shape") else host_array(value) for name, value in inputs.items()}
        with self._runtime.exclusive():
            self._check_usable()
            sizes = self._signature.bind({name: tuple(value.shape) for name, value in values.items()})
            bucket = self._bucket(self._signature.round_up(sizes))
            for name, value in values.items():
                bucket.write(name, value, sizes)
            bucket.run()
            self._replays += bucket.segments
            self._eager_runs += bucket.eager_nodes
            outputs = {name: bucket.output(name, sizes) for name in self._outputs}
            return {name: self._copy_of(output) for name, output in outputs.items()} if copy_outputs else outputs

    def prepare(self, sizes: Sizes | None = None) -> None:
        """Build the bucket for ``sizes`` (by symbol, rounded up to bucket sizes) now and not at its first call.

        Raises:
            EngineError: a symbol is missing, unknown or out of range.
            UnsupportedError: no kernel serves the shapes.
            CaptureError: this thread is capturing.
        """
        with self._runtime.exclusive():
            self._check_usable()
            self._bucket(self._signature.round_up(self._signature.check(sizes or {})))

    def report(self) -> EngineReport:
        """What was planned and done, and why each node is or is not captured; prints as a table."""
        with self._runtime.exclusive():
            return EngineReport(
                self.name,
                len(self._steps),
                tuple(bucket.report() for bucket in self._buckets.values()),
                self._captures,
                self._replays,
                self._eager_runs,
                self._evictions,
                self._max_bytes,
            )

    def close(self) -> None:
        """Destroy all buckets; outputs that somebody holds stay readable. After a failure, goes on where it stopped.

        Raises:
            CaptureError: this thread is capturing.
        """
        with self._runtime.exclusive():
            self._refuse_in_capture("close")
            self._closed = True
            for sizes in list(self._buckets):
                self._drop(sizes)
            self._bound = {}

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._steps)} node(s), {len(self._buckets)} bucket(s)"
        return f"Engine({self.name!r}, {state})"

    def _bucket(self, sizes: Sizes) -> Bucket:
        """The bucket of ``sizes``, which becomes the most recently used."""
        key = tuple(sizes.values())
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = self._build(sizes)
        self._buckets[key] = bucket
        return bucket

    def _build(self, sizes: Sizes) -> Bucket:
        plan = self._plan(sizes)
        self._make_room(plan.nbytes)
        label = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
        name = f"{self.name} [{label}]" if label else self.name
        bucket = Bucket.build(self._runtime, self._steps, plan, self._bound_for(sizes), name, debug=self._debug)
        self._captures += bucket.segments
        self._make_room(bucket.nbytes)
        return bucket

    def _plan(self, sizes: Sizes) -> BucketPlan:
        return plan_bucket(
            self._steps,
            {name: declaration.resolve(sizes) for name, declaration in self._signature.inputs.items()},
            {name: view.metadata for name, view in self._bound_for(sizes).items()},
            self._outputs,
            self._signature.padding,
        )

    def _bound_for(self, sizes: Sizes) -> dict[str, TensorView]:
        """The bound tensors as the bucket of ``sizes`` sees them."""
        windows = self._signature.windows
        return {
            name: _front(view, windows[name], sizes) if name in windows else view for name, view in self._bound.items()
        }

    def _make_room(self, nbytes: int) -> None:
        """Give up the least recently used buckets until ``nbytes`` more are within the bound, or none is left."""
        if self._max_bytes is None:
            return
        while self._buckets and nbytes + sum(bucket.nbytes for bucket in self._buckets.values()) > self._max_bytes:
            self._drop(next(iter(self._buckets)))
            self._evictions += 1

    def _drop(self, key: tuple[int, ...]) -> None:
        self._buckets[key].close()
        del self._buckets[key]

    def _copy_of(self, output: TensorMut) -> TensorMut:
        copy = self._runtime.empty(output.shape, output.dtype)
        self._runtime.copy(copy, output)
        return copy

    def _check_usable(self) -> None:
        if self._closed or self._runtime.is_closed:
            what = self.name if self._closed else f"the runtime of {self.name}"
            raise RuntimeStateError(f"{what} is closed")
        self._refuse_in_capture("run")

    def _refuse_in_capture(self, operation: str) -> None:
        if self._runtime.is_capturing():
            raise CaptureError(
                f"{self.name} cannot {operation} while this thread captures a CUDA graph; it has graphs of its own",
                operation=f"engine {operation}",
                state="capturing",
            )


def _front(view: TensorView, window: Declaration, sizes: Sizes) -> TensorView:
    """The part of a bound tensor that a bucket sees.

    Raises:
        EngineError: the tensor has another dtype or rank than declared, or is smaller.
    """
    wanted = window.resolve(sizes)
    has_room = len(view.shape) == len(wanted.shape) and all(
        have >= want for have, want in zip(view.shape, wanted.shape, strict=True)
    )
    if view.dtype != wanted.dtype or not has_room:
        raise EngineError(
            f"bound tensor '{window.name}' is {view.dtype} {view.shape}; at least {wanted.dtype} {wanted.shape} is "
            "declared"
        )
    for axis, extent in enumerate(wanted.shape):
        if extent != view.shape[axis]:
            view = view.narrow(axis, 0, extent)
    return view
