"""Tensors, their metadata and element types: what they say of themselves, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.dtype import data_type
from nxrt_cuda.tensor import contiguous_strides

ALL_TYPES = [
    nx.float32, nx.float16, nx.bfloat16, nx.float64, nx.int64, nx.int32, nx.int8, nx.uint64, nx.uint32, nx.uint8,
    nx.bool_,
]  # fmt: skip


# Element types.


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_a_type_is_found_by_each_of_its_names(dtype: nx.DataType) -> None:
    assert data_type(dtype) is dtype
    assert data_type(dtype.numpy) is dtype
    assert data_type(dtype.numpy.type) is dtype
    assert data_type(dtype.numpy.name) is dtype
    assert dtype.itemsize == dtype.numpy.itemsize


@pytest.mark.parametrize("dtype", ["complex64", "float8", "U5", object, ">f4", "M8[ns]", 17, None])
def test_an_unsupported_type_is_refused_with_the_supported_ones(dtype: Any) -> None:
    with pytest.raises(nx.TensorError, match=r"is not supported; use one of float32, .*bfloat16.*, bool$"):
        data_type(dtype)


def test_types_are_equal_by_name_and_print_it() -> None:
    assert str(nx.bfloat16) == "BFloat16"
    assert repr(nx.bfloat16) == "nxrt_cuda.bfloat16"
    assert len(set(ALL_TYPES)) == len(ALL_TYPES)


# Metadata.


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1)), ((1, 1), (1, 1))],
)
def test_row_major_strides_count_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == strides
    assert nx.TensorMetadata(nx.float32, shape).strides == strides


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous", "span"),
    [
        ((2, 3), (3, 1), True, 6),
        ((2, 3), (1, 2), False, 6),
        ((2, 3), (4, 1), False, 7),
        ((2, 3), (0, 1), False, 3),
        ((1, 3), (99, 1), True, 3),
        ((3, 1), (1, 99), True, 3),
        ((0, 3), (7, 7), True, 0),
        ((), (), True, 1),
    ],
)
def test_contiguity_and_span(shape: tuple[int, ...], strides: tuple[int, ...], contiguous: bool, span: int) -> None:
    """The stride of an extent of one does not matter; the span ends with the last element that is addressed."""
    metadata = nx.TensorMetadata(nx.float16, shape, strides)
    assert metadata.is_contiguous is contiguous
    assert metadata.span_bytes == 2 * span
    assert metadata.nbytes == 2 * int(np.prod(shape))


def test_metadata_is_a_key() -> None:
    """Kernels keep their plans by it: equal ones hash alike, and every field counts."""
    key = nx.TensorMetadata(nx.float32, (2, 3))
    assert key == nx.TensorMetadata(nx.float32, (2, 3), (3, 1))
    assert hash(key) == hash(nx.TensorMetadata(nx.float32, (2, 3), (3, 1)))
    others = {
        nx.TensorMetadata(nx.float16, (2, 3)),
        nx.TensorMetadata(nx.float32, (3, 2)),
        nx.TensorMetadata(nx.float32, (2, 3), (1, 2)),
    }
    assert len(others | {key}) == 4


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((2, -1), (), "shape (2, -1) has a negative extent"),
        ((2, 3), (1,), "strides (1,) and shape (2, 3) differ in rank"),
    ],
)
def test_impossible_metadata_is_refused(shape: tuple[int, ...], strides: tuple[int, ...], message: str) -> None:
    with pytest.raises(nx.TensorError) as caught:
        nx.TensorMetadata(nx.float32, shape, strides)
    assert str(caught.value) == message


# Making tensors.


@pytest.mark.parametrize("shape", [(2.0, 3), (2.5,), ("4",), (None,)])
def test_extents_are_whole_numbers(rt: nx.CudaRuntime, shape: Any) -> None:
    """A float is not rounded to an extent."""
    with pytest.raises(nx.TensorError, match=r"the extents of shape .* must be whole numbers"):
        rt.empty(shape, nx.float32)


def test_numpy_integers_are_extents(rt: nx.CudaRuntime) -> None:
    assert rt.empty((np.int64(2), np.int32(3)), "float32").shape == (2, 3)


@pytest.mark.parametrize("shape", [(-1,), (2, -3)])
def test_negative_extents_are_refused(rt: nx.CudaRuntime, shape: tuple[int, ...]) -> None:
    before = rt.stats()
    with pytest.raises(nx.TensorError, match="negative extent"):
        rt.empty(shape, nx.float32)
    assert rt.stats() == before


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (3, 0, 2), (0,)])
def test_arrays_come_back_as_they_went(rt: nx.CudaRuntime, dtype: nx.DataType, shape: tuple[int, ...]) -> None:
    source = np.arange(1, 1 + int(np.prod(shape))).astype(dtype.numpy).reshape(shape)
    tensor = rt.from_array(source)
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    back = tensor.numpy()
    assert (back.dtype, back.shape) == (source.dtype, source.shape)
    np.testing.assert_array_equal(back, source)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4)[:, ::2],
        np.arange(12).reshape(3, 4).T,
        np.asfortranarray(np.ones((3, 4))),
        [[1, 2], [3, 4]],
        5,
    ],
    ids=["sliced", "transposed", "fortran", "list", "scalar"],
)
def test_any_layout_that_numpy_reads_is_accepted(rt: nx.CudaRuntime, array: Any) -> None:
    tensor = rt.from_array(array)
    assert tensor.is_contiguous
    np.testing.assert_array_equal(tensor.numpy(), np.asarray(array))


@pytest.mark.parametrize("array", [np.ones(2, np.complex64), np.array(["a"]), np.array([object()]), np.ones(2, ">f4")])
def test_arrays_of_other_types_are_refused_before_anything_is_allocated(rt: nx.CudaRuntime, array: np.ndarray) -> None:
    before = rt.stats()
    with pytest.raises(nx.TensorError, match="is not supported"):
        rt.from_array(array)
    assert rt.stats() == before


def test_fresh_memory_is_not_zero_by_chance_and_zeros_is(rt: nx.CudaRuntime) -> None:
    rt.from_array(np.full(8, 3, np.float32)).free()
    np.testing.assert_array_equal(rt.zeros((8,), nx.float32).numpy(), np.zeros(8))


def test_an_array_that_was_read_belongs_to_the_caller(rt: nx.CudaRuntime) -> None:
    tensor = rt.zeros((4,), nx.float32)
    first = tensor.numpy()
    first[:] = 9
    np.testing.assert_array_equal(tensor.numpy(), np.zeros(4))


# Views.


def test_narrow_is_a_window_on_the_same_memory(rt: nx.CudaRuntime) -> None:
    source = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor = rt.from_array(source)
    for dim, start, length in ((0, 1, 1), (1, 1, 2), (2, 2, 2), (-1, 0, 3), (1, 3, 0)):
        window = tensor.narrow(dim, start, length)
        axis = dim % 3
        expected = source.take(range(start, start + length), axis=axis)
        assert window.owner is tensor.owner
        assert type(window) is nx.TensorMut
        np.testing.assert_array_equal(window.numpy(), expected)


def test_a_window_given_in_numpy_s_numbers_has_python_s(rt: nx.CudaRuntime) -> None:
    """Other libraries, which get address and shape, take no others."""
    window = rt.zeros((4, 2), nx.float32).narrow(*np.array([0, 1, 2]))
    assert [type(number) for number in (window.ptr, *window.shape)] == [int] * 3


@pytest.mark.parametrize(
    ("dim", "start", "length", "message"),
    [
        (2, 0, 1, "narrow: dim 2 of a tensor of rank 2"),
        (-3, 0, 1, "narrow: dim -3 of a tensor of rank 2"),
        (0, 1, 2, "narrow: [1, 3) lies outside extent 2 of dim 0"),
        (1, -1, 1, "narrow: [-1, 0) lies outside extent 3 of dim 1"),
        (1, 1, -1, "narrow: [1, 0) lies outside extent 3 of dim 1"),
        (1, 0.5, 1, "narrow: dim 1, start 0.5, length 1: each must be a whole number"),
    ],
)
def test_a_window_outside_the_tensor_is_refused(
    rt: nx.CudaRuntime, dim: int, start: int, length: int, message: str
) -> None:
    with pytest.raises(nx.TensorError) as caught:
        rt.empty((2, 3), nx.float32).narrow(dim, start, length)
    assert str(caught.value) == message


def test_reshape_keeps_the_elements(rt: nx.CudaRuntime) -> None:
    tensor = rt.from_array(np.arange(6, dtype=np.int32))
    again = tensor.reshape((2, 3))
    assert again.ptr == tensor.ptr
    np.testing.assert_array_equal(again.numpy(), np.arange(6).reshape(2, 3))
    with pytest.raises(nx.TensorError, match=r"^reshape of 6 elements to \(4,\)$"):
        tensor.reshape((4,))
    with pytest.raises(nx.TensorError, match="reshape of a strided tensor"):
        again.narrow(1, 0, 2).reshape((4,))


def test_a_view_cannot_reach_out_of_its_memory(rt: nx.CudaRuntime) -> None:
    owner = rt.alloc_graph_stable(64)
    nx.TensorView(owner.ptr, nx.TensorMetadata(nx.float32, (16,)), owner)
    with pytest.raises(nx.TensorError, match=r"a Float32 tensor of shape \(17,\) at 0x[0-9a-f]+ reaches past its"):
        nx.TensorView(owner.ptr, nx.TensorMetadata(nx.float32, (17,)), owner)
    with pytest.raises(nx.TensorError, match="reaches past its memory"):
        nx.TensorView(owner.ptr, nx.TensorMetadata(nx.float32, (2, 2), (15, 1)), owner)
    with pytest.raises(nx.TensorError, match="reach before the tensor"):
        nx.TensorView(owner.ptr, nx.TensorMetadata(nx.float32, (4,), (-1,)), owner)


def test_a_view_before_the_start_of_its_memory_is_refused(rt: nx.CudaRuntime) -> None:
    owner = rt.alloc_graph_stable(64)
    with pytest.raises(nx.TensorError, match="begins before its memory"):
        nx.TensorView(owner.ptr - 4, nx.TensorMetadata(nx.float32, (4,)), owner)


def test_a_view_whose_memory_does_not_align_its_elements_is_refused(rt: nx.CudaRuntime) -> None:
    """A kernel that reads there ends the context. Memory of bytes has any address, and an empty tensor none."""
    owner = rt.alloc_graph_stable(64)
    for dtype in (nx.float16, nx.float32, nx.int64):
        begin = owner.ptr + dtype.itemsize // 2
        message = f"a {dtype} tensor at 0x{begin:x} is misaligned; its elements begin at multiples of {dtype.itemsize} "
        for kind in (nx.TensorView, nx.TensorMut):
            with pytest.raises(nx.TensorError, match=message):
                kind(begin, nx.TensorMetadata(dtype, (4,)), owner)
        kind(begin, nx.TensorMetadata(dtype, (0,)), owner)
        kind(owner.ptr + dtype.itemsize, nx.TensorMetadata(dtype, (4,)), owner)
    nx.TensorView(owner.ptr + 1, nx.TensorMetadata(nx.uint8, (4,)), owner)


def test_strided_and_broadcast_views_are_read_element_by_element(rt: nx.CudaRuntime) -> None:
    source = np.arange(12, dtype=np.float32)
    owner = rt.from_array(source).owner
    metadata = nx.TensorMetadata(nx.float32, (3, 2), (1, 4))
    np.testing.assert_array_equal(
        nx.TensorView(owner.ptr, metadata, owner).numpy(), np.lib.stride_tricks.as_strided(source, (3, 2), (4, 16))
    )
    broadcast = nx.TensorView(owner.ptr, nx.TensorMetadata(nx.float32, (2, 3), (0, 1)), owner)
    np.testing.assert_array_equal(broadcast.numpy(), [[0, 1, 2], [0, 1, 2]])


def test_bfloat16_views_are_read_too(rt: nx.CudaRuntime) -> None:
    source = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    window = rt.from_array(source).narrow(1, 1, 2)
    assert not window.is_contiguous
    np.testing.assert_array_equal(window.numpy().astype(np.float32), source[:, 1:].astype(np.float32))


# Writing.


def test_copy_from_overwrites_and_casts_within_a_kind(rt: nx.CudaRuntime) -> None:
    tensor = rt.zeros((2, 2), nx.bfloat16)
    tensor.copy_from(np.array([[1, 2], [3, 4]], np.float64))
    np.testing.assert_array_equal(tensor.numpy().astype(np.float32), [[1, 2], [3, 4]])
    tensor.copy_from([[5, 6], [7, 8]])
    np.testing.assert_array_equal(tensor.numpy().astype(np.float32), [[5, 6], [7, 8]])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), r"cannot copy an array of shape \(3,\) into a tensor of shape \(2, 2\)"),
        (np.ones((2, 2)), "cannot cast float64 to Int32; convert the array first"),
        (np.ones((2, 2), np.complex64), "cannot cast complex64 to Int32"),
    ],
)
def test_a_write_of_another_shape_or_kind_is_refused_and_changes_nothing(
    rt: nx.CudaRuntime, array: np.ndarray, message: str
) -> None:
    tensor = rt.from_array(np.array([[1, 2], [3, 4]], np.int32))
    before = rt.stats()
    with pytest.raises(nx.TensorError, match=message):
        tensor.copy_from(array)
    assert rt.stats() == before
    np.testing.assert_array_equal(tensor.numpy(), [[1, 2], [3, 4]])


def test_copying_from_a_tensor_is_refused_with_the_call_that_does_it(rt: nx.CudaRuntime) -> None:
    """To NumPy a tensor is an object without a shape, of which its complaint would be."""
    source, target = rt.from_array(np.ones(3, np.float32)), rt.zeros((3,), nx.float32)
    with pytest.raises(nx.TensorError, match=r"copy_from of TensorMut\(.+\), which is on the device.*use copy\("):
        target.copy_from(source)
    rt.copy(target, source)
    np.testing.assert_array_equal(target.numpy(), np.ones(3))


def test_a_strided_target_is_refused(rt: nx.CudaRuntime) -> None:
    tensor = rt.zeros((2, 4), nx.float32)
    window = tensor.narrow(1, 0, 2)
    for attempt in (
        lambda: window.copy_from(np.ones((2, 2), np.float32)),
        lambda: rt.copy(window, rt.zeros((2, 2), nx.float32)),
        lambda: rt.fill_zero(window),
        lambda: rt.read_async(window),
    ):
        with pytest.raises(nx.TensorError, match=r"strided tensor: shape \(2, 2\), strides \(4, 1\)"):
            attempt()


# What a tensor says.


def test_a_tensor_prints_what_it_is_and_whether_it_is_dead(rt: nx.CudaRuntime) -> None:
    tensor = rt.zeros((2, 4), nx.float16)
    assert repr(tensor) == f"TensorMut(Float16, shape=(2, 4), ptr=0x{tensor.ptr:x})"
    assert ", strides=(4, 1), " in repr(tensor.narrow(1, 0, 2))
    tensor.free()
    assert repr(tensor).endswith(", freed)")


def test_an_input_view_cannot_be_written_by_its_own_methods(rt: nx.CudaRuntime) -> None:
    tensor = rt.zeros((4,), nx.float32)
    view = nx.TensorView(tensor.ptr, tensor.metadata, tensor.owner)
    assert not hasattr(view, "copy_from")
    assert not hasattr(view, "free")


def test_extents_are_whole_numbers_in_a_tuple(rt: nx.CudaRuntime) -> None:
    """Whatever sequence they are given in: metadata of one shape compare and hash alike."""
    metadata = nx.TensorMetadata(nx.float32, [2, 3], [3, 1])  # type: ignore[arg-type]
    assert metadata == nx.TensorMetadata(nx.float32, (2, 3))
    assert hash(metadata) == hash(nx.TensorMetadata(nx.float32, (2, 3)))
    x = rt.zeros((4, 8), nx.float32)
    assert x.reshape([np.int64(8), 4]).shape == (8, 4)
    with pytest.raises(nx.TensorError, match=r"the extents of shape \(4.0, 8\) must be whole numbers"):
        x.reshape((4.0, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in nx.__all__ if isinstance(getattr(nx, name), nx.DataType)])
def test_a_data_type_prints_as_the_name_it_has_here(name: str) -> None:
    assert repr(getattr(nx, name)) == f"nxrt_cuda.{name}"


# Host arrays in and out.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0], [1.0, 2.0]], "NumPy makes no array of what was given, a list: .*inhomogeneous"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "masked arrays have no counterpart here; fill"),
    ],
    ids=["ragged", "masked"],
)
@pytest.mark.parametrize(
    "take",
    [
        lambda rt, values: rt.from_array(values),
        lambda rt, values: rt.zeros((2,), nx.float64).copy_from(values),
        lambda rt, values: rt.htod(values, rt.alloc_raw(16)),
    ],
    ids=["from_array", "copy_from", "htod"],
)
def test_what_numpy_makes_no_plain_array_of_is_refused(
    rt: nx.CudaRuntime, take: Callable[[nx.CudaRuntime, Any], object], values: Any, message: str
) -> None:
    with pytest.raises(nx.TensorError, match=message):
        take(rt, values)


@pytest.mark.parametrize("dtype", [">f4", "complex64", "int16"])
def test_a_dtype_unknown_here_is_named_as_numpy_writes_it(rt: nx.CudaRuntime, dtype: str) -> None:
    with pytest.raises(nx.TensorError, match=rf"^dtype '{dtype}' is not supported; use one of float32, "):
        rt.from_array(np.zeros(2, dtype))


@pytest.mark.parametrize(
    "use",
    [np.asarray, lambda x: np.array(x, np.float32), lambda x: np.asarray([x, x])],
    ids=["asarray", "array", "list"],
)
def test_numpy_does_not_take_a_tensor_for_an_object(rt: nx.CudaRuntime, use: Callable[[nx.TensorMut], object]) -> None:
    with pytest.raises(nx.TensorError, match=r"^TensorMut\(.*is no array in host memory; numpy\(\) copies it there$"):
        use(rt.zeros((3,), nx.float32))


def test_operators_between_tensors_and_arrays_convert_nothing(rt: nx.CudaRuntime) -> None:
    x, array = rt.zeros((3,), nx.float32), np.zeros(3, np.float32)
    assert x != array
    assert array != x
    assert x in [array, x]
    with pytest.raises(TypeError):
        array + x
