"""What an engine is called with: declared inputs, the symbols in their shapes, and the buckets of a symbol.

A dimension is a number or a symbol such as ``"B"``. The shapes of a call give the symbols their sizes,
and each combination of sizes has a bucket of its own. A symbol with *bucket sizes* is rounded up to the
next of them; the call's tensors then fill the front of the bucket's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any

from nxrt_cuda.dtype import DataType, data_type
from nxrt_cuda.errors import EngineError, TensorError, UnsupportedError
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["Declaration", "Signature", "Sizes"]

Sizes = Mapping[str, int]
"""A size for every symbol."""


@dataclass(frozen=True)
class Declaration:
    """A tensor that an engine is given: its element type, and a shape of numbers and symbols."""

    name: str
    dtype: DataType
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, name: str, entry: Any) -> Declaration:
        """Check a (dtype, shape) pair.

        Raises:
            EngineError: it is no pair, or a dimension is neither a whole number >= 0 nor a symbol.
            TensorError: the dtype is unknown here.
        """
        try:
            dtype, shape = entry
            dimensions = tuple(size if isinstance(size, str) else as_index(size) for size in shape)
        except (TypeError, ValueError):
            raise EngineError(
                f"input '{name}' is declared as {entry!r}; give (dtype, shape) with whole numbers and symbols"
            ) from None
        if any(size == "" or (isinstance(size, int) and size < 0) for size in dimensions):
            raise EngineError(f"input '{name}': shape {dimensions} has a negative or nameless dimension")
        try:
            return cls(name, data_type(dtype), dimensions)
        except TensorError as error:
            raise TensorError(f"input '{name}': {error}") from None

    def resolve(self, sizes: Sizes) -> TensorMetadata:
        """The metadata once the symbols have sizes."""
        shape = tuple(sizes[dimension] if isinstance(dimension, str) else dimension for dimension in self.shape)
        return TensorMetadata(self.dtype, shape)


class Signature:
    """What an engine's calls give, and the sizes that follow.

    Args:
        declared: (dtype, shape) by name.
        bound: names that are bound to tensors, declared or not.
        bucket_sizes: of symbols.

    Attributes:
        inputs: what a call gives, by name.
        windows: the declared ones of the bound tensors, which may be larger.
        symbols: of the inputs' shapes, in the order of their appearance.
        padding: the symbol at axis 0 of every input and window where it has bucket sizes.

    Raises:
        EngineError: a declaration is malformed; a symbol occurs in bound tensors only, so that no call gives
            it a size; or bucket sizes are not positive, or of an unknown symbol.
        UnsupportedError: a symbol with bucket sizes occurs elsewhere than at axis 0.
    """

    def __init__(
        self, declared: Mapping[str, Any], bound: Collection[str], bucket_sizes: Mapping[str, Sequence[int]]
    ) -> None:
        declarations = {name: Declaration.of(name, entry) for name, entry in declared.items()}
        self.inputs = {name: d for name, d in declarations.items() if name not in bound}
        self.windows = {name: d for name, d in declarations.items() if name in bound}
        self.symbols = tuple(dict.fromkeys(symbol for d in self.inputs.values() for _, symbol in _symbols(d)))
        self._bucket_sizes = {symbol: _sorted(symbol, sizes) for symbol, sizes in bucket_sizes.items()}
        for window in self.windows.values():
            for _, symbol in _symbols(window):
                if symbol not in self.symbols:
                    raise EngineError(f"'{symbol}' of the bound '{window.name}' is a dimension of no input of a call")
        for symbol in self._bucket_sizes:
            if symbol not in self.symbols:
                raise EngineError(f"bucket sizes of '{symbol}'; the symbols are {_listed(self.symbols)}")
        self.padding: dict[str, str] = {}
        for declaration in declarations.values():
            for axis, symbol in _symbols(declaration):
                if symbol not in self._bucket_sizes:
                    continue
                if axis > 0:
                    raise UnsupportedError(
                        f"'{symbol}' cannot have bucket sizes: it is axis {axis} of '{declaration.name}', and only a "
                        "batch at axis 0 may be padded; without bucket sizes, every size has an exact bucket"
                    )
                self.padding[declaration.name] = symbol

    def bind(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The sizes that ``shapes`` give the symbols.

        Raises:
            EngineError: an input is missing or unknown, or shapes do not fit; everything wrong is named.
        """
        sizes: dict[str, int] = {}
        if problems := [*self._problems(shapes, sizes)]:
            raise EngineError(f"the call does not fit the engine: {'; '.join(problems)}")
        return sizes

    def check(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """``sizes``, in the order of the symbols.

        Raises:
            EngineError: a symbol is missing or unknown, or its size is no whole number >= 0.
        """
        if set(sizes) != set(self.symbols):
            raise EngineError(f"sizes of {_listed(sizes)} given; the symbols are {_listed(self.symbols)}")
        checked = {}
        for symbol in self.symbols:
            try:
                checked[symbol] = as_index(sizes[symbol])
            except TypeError:
                checked[symbol] = -1
            if checked[symbol] < 0:
                raise EngineError(f"{symbol} = {sizes[symbol]!r} is no whole number >= 0")
        return checked

    def round_up(self, sizes: Sizes) -> dict[str, int]:
        """The sizes of the bucket that serves ``sizes``.

        Raises:
            EngineError: a size exceeds the largest bucket.
        """
        rounded = dict(sizes)
        for symbol, buckets in self._bucket_sizes.items():
            size = next((bucket for bucket in buckets if bucket >= sizes[symbol]), None)
            if size is None:
                raise EngineError(f"{symbol} = {sizes[symbol]} exceeds its largest bucket, {buckets[-1]}")
            rounded[symbol] = size
        return rounded

    def _problems(self, shapes: Mapping[str, tuple[int, ...]], sizes: dict[str, int]) -> Iterator[str]:
        for name in shapes:
            if name not in self.inputs:
                yield f"there is no input '{name}'; the inputs are {_listed(self.inputs)}"
        for name, declaration in self.inputs.items():
            shape = shapes.get(name)
            if shape is None:
                yield f"input '{name}' is missing"
            elif shape != declaration.shape:
                yield from _bind(declaration, shape, sizes)


def _sorted(symbol: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Bucket sizes, ascending."""
    try:
        ascending = tuple(sorted(as_index(size) for size in sizes))
    except TypeError:
        ascending = ()
    if not ascending or ascending[0] < 1:
        raise EngineError(f"bucket sizes of '{symbol}' are a list of whole numbers >= 1, got {sizes!r}")
    return ascending


def _bind(declaration: Declaration, shape: tuple[int, ...], sizes: dict[str, int]) -> Iterator[str]:
    """Enter the sizes of one input's symbols; what does not fit."""
    what = f"input '{declaration.name}' has shape {shape}, declared {declaration.shape}"
    if len(shape) != len(declaration.shape):
        yield what
        return
    for extent, dimension in zip(shape, declaration.shape, strict=True):
        if isinstance(dimension, int):
            if extent != dimension:
                yield what
                return
        elif sizes.setdefault(dimension, extent) != extent:
            yield f"{what}, where {dimension} = {sizes[dimension]} by another input"


def _symbols(declaration: Declaration) -> Iterator[tuple[int, str]]:
    for axis, dimension in enumerate(declaration.shape):
        if isinstance(dimension, str):
            yield axis, dimension


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
