"""Launches: declared arguments, golden bytes, limits, and the steady state."""

from __future__ import annotations

import ctypes
import gc
import math
import struct
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.launch import div_up
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, MIXED, SCALE

ONE_BLOCK = nx.LaunchConfig((1, 1, 1), (128, 1, 1))


def packed(params: list[tuple[str, str]], *arguments: Any) -> nx.PreparedLaunch:
    """A launch of a kernel that exists on paper only."""
    spec = nx.KernelSpec("paper.cu", "paper", tuple(nx.Param(*param) for param in params), threads=128)
    return nx.PreparedLaunch(SimpleNamespace(spec=spec), ONE_BLOCK, arguments)  # type: ignore[arg-type]


def read(prepared: nx.PreparedLaunch, position: int, code: str) -> Any:
    """An argument as the driver reads it: through the pointer array."""
    pointer = ctypes.c_uint64.from_address(prepared.params + 8 * position).value
    return struct.unpack(code, ctypes.string_at(pointer, struct.calcsize(code)))[0]


# Packing.


def test_a_tensor_map_is_128_bytes_at_a_multiple_of_64() -> None:
    """Where ``const __grid_constant__ TensorMap`` parameters lie; nothing else is taken for one."""
    maps = bytes(range(128)), bytes(range(128, 256))
    launch = packed([("a", "i32"), ("m", "tensor_map"), ("b", "i32"), ("n", "tensor_map")], 1, maps[0], 2, maps[1])
    assert [tuple(info) for info in launch.function.spec.layout] == [(0, 4), (64, 128), (192, 4), (256, 128)]
    assert ctypes.c_uint64.from_address(launch.params + 8).value % 64 == 0
    assert (read(launch, 1, "128s"), read(launch, 3, "128s")) == maps
    for other in (bytes(127), 0, None, "map", [0] * 128):
        with pytest.raises(nx.LaunchError, match=r"argument 'm' \(TensorMap\)"):
            launch.set(1, other)


def test_mixed_arguments_have_the_bytes_of_the_c_abi() -> None:
    """Each argument lies at its natural alignment, with every field different and no byte borrowed from another."""
    launch = packed(
        [("a", "i32"), ("b", "u64"), ("c", "f32"), ("d", "f64"), ("e", "u32"), ("f", "ptr"), ("g", "i64")],
        -2,
        0x1122334455667788,
        1.5,
        -2.25,
        0xDEADBEEF,
        0xCAFE0000F00D,
        -3,
    )
    offsets = [info.offset for info in launch.function.spec.layout]
    sizes = [info.size for info in launch.function.spec.layout]
    assert offsets == [0, 8, 16, 24, 32, 40, 48]
    assert sizes == [4, 8, 4, 8, 4, 8, 8]
    first = ctypes.c_uint64.from_address(launch.params).value
    pointers = [ctypes.c_uint64.from_address(launch.params + 8 * i).value for i in range(7)]
    assert [pointer - first for pointer in pointers] == offsets
    assert ctypes.string_at(first, 56).hex(" ", 8) == (
        "feffffff00000000 8877665544332211 0000c03f00000000 00000000000002c0 "
        "efbeadde00000000 0df00000feca0000 fdffffffffffffff"
    )


def test_the_argument_block_is_aligned_for_every_type() -> None:
    for _ in range(20):
        launch = packed([("x", "f64")], 1.0)
        assert ctypes.c_uint64.from_address(launch.params).value % 8 == 0


def test_arguments_arrive_on_the_other_side_of_the_driver(rt: nx.CudaRuntime) -> None:
    """A kernel that stores what it was given: each value in its own width, none swapped with a neighbour."""
    out = rt.zeros((6,), nx.float64)
    rt.launch(MIXED.prepare(rt, 1, out, -7, 2**52 + 1, 0.1, -(2**40), 2**32 - 1, 1e300))
    np.testing.assert_array_equal(out.numpy(), [-7, 2**52 + 1, np.float32(0.1), -(2**40), 2**32 - 1, 1e300])


@pytest.mark.parametrize(
    ("kind", "value", "code", "expected"),
    [
        ("i32", np.int64(-5), "i", -5),
        ("i32", np.uint8(200), "i", 200),
        ("i32", True, "i", 1),
        ("u32", 2**32 - 1, "I", 2**32 - 1),
        ("i64", np.int32(-1), "q", -1),
        ("u64", np.uint64(2**64 - 1), "Q", 2**64 - 1),
        ("f32", 3, "f", 3.0),
        ("f32", np.float16(0.5), "f", 0.5),
        ("f32", np.float32(0.1), "f", float(np.float32(0.1))),
        ("f32", np.int64(7), "f", 7.0),
        ("f32", Fraction(1, 4), "f", 0.25),
        ("f32", 3.4028234663852886e38, "f", 3.4028234663852886e38),
        ("f32", math.inf, "f", math.inf),
        ("f64", np.float64(0.1), "d", 0.1),
        ("f64", -math.inf, "d", -math.inf),
        ("ptr", 2**63, "Q", 2**63),
        ("ptr", 0, "Q", 0),
    ],
)
def test_numbers_are_converted_to_the_declared_width(kind: str, value: Any, code: str, expected: float) -> None:
    assert read(packed([("x", kind)], value), 0, code) == expected


def test_nan_is_a_float_like_any_other() -> None:
    assert math.isnan(read(packed([("x", "f32")], math.nan), 0, "f"))


@pytest.mark.parametrize(
    ("kind", "value", "cuda"),
    [
        ("i32", 2**31, "int"),
        ("i32", 2**32 + 5, "int"),
        ("i32", -(2**31) - 1, "int"),
        ("u32", 2**32 + 5, "unsigned int"),
        ("u32", -1, "unsigned int"),
        ("i64", 2**63, "long long"),
        ("i64", -(2**63) - 1, "long long"),
        ("u64", 2**64, "unsigned long long"),
        ("u64", -1, "unsigned long long"),
        ("ptr", -1, "T*"),
        ("ptr", 2**64, "T*"),
        ("f32", 1e39, "float"),
        ("f32", -1e39, "float"),
        ("f32", 10**400, "float"),
        ("f64", 10**400, "double"),
    ],
)
def test_a_value_outside_the_width_is_refused_and_never_cut(kind: str, value: float, cuda: str) -> None:
    """``ctypes.c_int(2**32 + 5)`` is 5; here it is an OverflowError that names kernel and argument."""
    with pytest.raises(nx.LaunchOverflowError) as caught:
        packed([("first", "i32"), ("size", kind)], 1, value)
    assert str(caught.value) == f"paper: argument 'size' = {value!r} does not fit {cuda}"
    assert isinstance(caught.value, OverflowError)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("i32", 1.0),
        ("i32", np.float32(1)),
        ("i32", "1"),
        ("i32", None),
        ("i32", np.bool_(True)),
        ("u64", 1.5),
        ("ptr", 1.5),
        ("ptr", b"bytes"),
        ("ptr", np.zeros(2)),
        ("f32", True),
        ("f32", "1.0"),
        ("f32", None),
        ("f32", 1 + 0j),
        ("f64", ml_dtypes.bfloat16(1)),
    ],
)
def test_a_value_of_another_kind_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(nx.LaunchError, match=r"^paper: argument 'x' \(.+\) got "):
        packed([("x", kind)], value)


@pytest.mark.parametrize("kind", ["i32", "i64", "u64", "f32", "f64"])
def test_a_tensor_stands_for_its_address_in_pointer_arguments_only(rt: nx.CudaRuntime, kind: str) -> None:
    """A tensor given for a number is a mistake, not an address in disguise."""
    tensor = rt.zeros((4,), nx.float32)
    assert read(packed([("x", "ptr")], tensor), 0, "Q") == tensor.ptr
    with pytest.raises(nx.LaunchError, match=r"argument 'x' \(.+\) got TensorMut"):
        packed([("x", kind)], tensor)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_argument_count_must_be_the_declared_one(rt: nx.CudaRuntime, count: int) -> None:
    with pytest.raises(nx.LaunchError, match=rf"^add_one takes 2 arguments, got {count}$"):
        ADD_ONE.prepare(rt, 1, *[0] * count)


def test_an_unknown_parameter_kind_is_refused_with_the_known_ones(rt: nx.CudaRuntime) -> None:
    with pytest.raises(
        nx.LaunchError, match="parameter 'x' is of the unknown kind 'half'; there are ptr, i32, u32, i64, u64, f32, f64"
    ):
        rt.nvrtc_function("m", ADD_ONE.source, "add_one", [("x", "half"), ("n", "i32")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": (nx.Param("x", "ptr"), nx.Param("x", "i32"))}, "add_one: two parameters are named 'x'"),
        ({"macros": (("TILE", "1"), ("TILE", "2"))}, "add_one: two macros are named 'TILE'"),
        ({"macros": (("A B", "1"),)}, "add_one: a macro cannot be named 'A B'"),
        ({"threads": 0}, r"add_one: threads must be in \[1, 1024\], got 0"),
        ({"threads": 1025}, r"add_one: threads must be in \[1, 1024\], got 1025"),
    ],
    ids=str,
)
def test_a_specialisation_that_no_compiler_takes_is_refused(fields: dict[str, object], message: str) -> None:
    whole: dict[str, object] = {"source": "m", "entry": "add_one", "params": (), "threads": 32}
    nx.KernelSpec(**{**whole, "macros": (("TWICE(x)", "2 * (x)"),)})
    with pytest.raises(nx.LaunchError, match=f"^{message}$"):
        nx.KernelSpec(**{**whole, **fields})


def test_a_prepared_launch_prints_what_it_launches() -> None:
    launch = packed([("a", "i32")], 1)
    assert repr(launch) == f"PreparedLaunch({launch.label})"


def test_renewing_an_argument_writes_that_one_alone() -> None:
    launch = packed([("a", "i32"), ("b", "i32"), ("c", "i32")], 1, 2, 3)
    launch.set(1, -9)
    assert launch.arguments() == {"a": 1, "b": -9, "c": 3}


def test_a_refused_renewal_leaves_the_argument_as_it_was() -> None:
    launch = packed([("a", "i32"), ("b", "f32")], 1, 2.0)
    for position, value in ((0, 2**40), (0, 1.5), (1, 1e39), (1, "x")):
        with pytest.raises(nx.LaunchError):
            launch.set(position, value)
    assert launch.arguments() == {"a": 1, "b": 2.0}


def test_binding_renews_the_leading_pointers() -> None:
    launch = packed([("a", "ptr"), ("b", "ptr"), ("n", "i32")], 1, 2, 3)
    launch.bind(0x1000, 0x2000)
    assert launch.arguments() == {"a": 0x1000, "b": 0x2000, "n": 3}


def test_a_copy_is_bound_for_itself() -> None:
    launch = packed([("a", "ptr"), ("n", "i32")], 1, 3)
    launch.bind(0x1000)
    twin = launch.copy()
    twin.bind(0x2000)
    launch.bind(0x3000)
    assert (launch.arguments(), twin.arguments()) == ({"a": 0x3000, "n": 3}, {"a": 0x2000, "n": 3})


def test_the_addresses_of_a_launch_are_its_pointer_arguments() -> None:
    launch = packed([("a", "ptr"), ("n", "u64"), ("b", "ptr")], 0x1000, 7, 2**63)
    launch.bind(0x3000)
    assert list(launch.addresses().values()) == [0x3000, 2**63]


def test_a_launch_without_parameters_is_a_launch() -> None:
    assert packed([]).arguments() == {}


def test_argument_storage_belongs_to_one_launch(rt: nx.CudaRuntime) -> None:
    """Two launches of one function do not see each other's arguments, however they interleave."""
    x, out = rt.from_array(np.full(4, 2, np.float32)), rt.zeros((4,), nx.float32)
    double, triple = SCALE.prepare(rt, 4, out, x, 2.0, 4), SCALE.prepare(rt, 4, out, x, 3.0, 4)
    rt.launch(triple)
    rt.launch(double)
    np.testing.assert_array_equal(out.numpy(), np.full(4, 4, np.float32))


def test_arguments_are_taken_when_the_launch_is_made(rt: nx.CudaRuntime) -> None:
    """Renewing an argument does not reach a launch that is still queued."""
    x, out = rt.from_array(np.ones(4, np.float32)), rt.zeros((4,), nx.float32)
    launch = SCALE.prepare(rt, 4, out, x, 5.0, 4)
    rt.launch(launch)
    launch.set(2, 7.0)
    np.testing.assert_array_equal(out.numpy(), np.full(4, 5, np.float32))


# Extents.


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((2**31, 1, 1), (1, 1, 1), 0, "grid.x = 2147483648 is outside [0, 2147483647]"),
        ((1, 65536, 1), (1, 1, 1), 0, "grid.y = 65536 is outside [0, 65535]"),
        ((1, 1, 65536), (1, 1, 1), 0, "grid.z = 65536 is outside [0, 65535]"),
        ((-1, 1, 1), (1, 1, 1), 0, "grid.x = -1 is outside [0, 2147483647]"),
        ((1, 1, 1), (0, 1, 1), 0, "block.x = 0 is outside [1, 1024]"),
        ((1, 1, 1), (1025, 1, 1), 0, "block.x = 1025 is outside [1, 1024]"),
        ((1, 1, 1), (1, 1, 65), 0, "block.z = 65 is outside [1, 64]"),
        ((1, 1, 1), (64, 32, 1), 0, "block (64, 32, 1) has 2048 threads; CUDA allows 1024"),
        ((1, 1, 1), (1, 1, 1), -1, "shared_bytes = -1 is negative"),
    ],
)
def test_extents_outside_cuda_s_limits_are_refused_when_written_down(
    grid: nx.driver.base.Dim3, block: nx.driver.base.Dim3, shared: int, message: str
) -> None:
    with pytest.raises(nx.LaunchError) as caught:
        nx.LaunchConfig(grid, block, shared)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("grid", "block"), [((1, 1), (32, 1, 1)), ((1, 1, 1), (32,)), ((1.5, 1, 1), (32, 1, 1)), (1, 1), ((1, 1, 1), None)]
)
def test_extents_are_three_whole_numbers(grid: Any, block: Any) -> None:
    with pytest.raises(nx.LaunchError, match="three whole numbers"):
        nx.LaunchConfig(grid, block)


def test_extents_are_kept_as_tuples_of_int_however_they_are_given(rt: nx.CudaRuntime) -> None:
    """Sizes are often NumPy's; and pictures, traces and dictionaries of configs take nothing else."""
    plain = nx.LaunchConfig((1, 1, 1), (128, 1, 1), 64)
    given: list[Any] = [[1, 1, 1], np.array([128, 1, 1]), np.int64(64)]
    config = nx.LaunchConfig(*given)
    assert (config, hash(config), repr(config)) == (plain, hash(plain), repr(plain))
    launch = rt.prepare(ADD_ONE.load(rt), config, rt.zeros((4,), nx.float32), 4)
    with rt.capture() as graph:
        rt.launch(launch)
    assert "grid 1 x 1 x 1, block 128 x 1 x 1" in graph.to_dot()


def test_shared_memory_is_a_whole_number_of_bytes() -> None:
    with pytest.raises(nx.LaunchError, match=r"shared_bytes must be a whole number, got 1.5"):
        nx.LaunchConfig((1, 1, 1), (1, 1, 1), 1.5)  # type: ignore[arg-type]


def test_the_largest_extents_are_accepted_and_configs_compare_by_value() -> None:
    largest = nx.LaunchConfig((2**31 - 1, 65535, 65535), (16, 1, 64), 232448)
    assert not largest.is_empty
    assert largest == nx.LaunchConfig((2**31 - 1, 65535, 65535), (16, 1, 64), 232448)
    assert len({largest, nx.LaunchConfig((1, 1, 1), (1, 1, 1)), largest}) == 2


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_zero_grid_is_counted_and_reaches_no_driver(rt: nx.CudaRuntime, grid: nx.driver.base.Dim3) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = rt.prepare(ADD_ONE.load(rt), nx.LaunchConfig(grid, (128, 1, 1)), x, 4)
    before = rt.stats()
    rt.launch(launch)
    done = rt.stats().since(before)
    assert (done.empty_launches, done.launches) == (1, 0)
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))


def test_more_shared_memory_than_the_device_has_is_refused_with_both_sizes(rt: nx.CudaRuntime) -> None:
    limit = rt.capabilities.shared_memory_per_block_optin
    function = ADD_ONE.load(rt)
    rt.prepare(function, nx.LaunchConfig((1, 1, 1), (128, 1, 1), limit), 0, 0)
    with pytest.raises(nx.LaunchError, match=rf"add_one needs {limit + 1} bytes of dynamic shared .* {limit} bytes"):
        rt.prepare(function, nx.LaunchConfig((1, 1, 1), (128, 1, 1), limit + 1), 0, 0)


def test_more_threads_than_the_kernel_can_have_are_refused_with_both_numbers(rt: nx.CudaRuntime) -> None:
    function = ADD_ONE.load(rt)
    limit = function.max_threads
    rt.prepare(function, nx.LaunchConfig((1, 1, 1), (limit // 2, 2, 1)), 0, 0)
    with pytest.raises(nx.LaunchError, match=rf"add_one: block .* has {2 * limit} threads; .* allow {limit}$"):
        rt.prepare(function, nx.LaunchConfig((1, 1, 1), (limit // 2, 2, 2)), 0, 0)


def test_a_launch_that_the_driver_refuses_counts_for_nothing_and_the_next_one_works(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    before = rt.stats()
    with rt._driver.fail_call(call="launch_kernel"), pytest.raises(nx.DriverError, match="cuLaunchKernel"):
        rt.launch(launch)
    assert rt.stats() == before
    rt.launch(launch)
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_what_another_runtime_loaded_or_prepared_is_refused(rt: nx.CudaRuntime) -> None:
    """Its module may be unloaded, and its memory freed, at any time."""
    with nx.open_runtime(rt.device, host_entries=HOST_ENTRIES) as other:
        theirs = ADD_ONE.prepare(other, 4, other.zeros((4,), nx.float32), 4)
        before = rt.stats()
        for attempt in (
            lambda: rt.launch(theirs),
            lambda: rt.launch(theirs, ()),
            lambda: rt.prepare(theirs.function, ONE_BLOCK, 0, 0),
        ):
            with pytest.raises(nx.LaunchError, match="add_one was loaded by another runtime, not by this one on host"):
                attempt()
        assert rt.stats() == before


def test_a_tensor_that_replaces_another_is_the_one_that_is_kept_and_checked(rt: nx.CudaRuntime) -> None:
    """A graph keeps the new memory, and the old one is nobody's any more; a plain address stands for no tensor."""
    old, new = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, old, 4)
    rt.launch(launch)
    launch.set(0, new)
    assert launch.operands == (new,)
    old.free()
    with rt.capture() as graph:
        rt.launch(launch)
    with pytest.raises(nx.DeviceMemoryError, match="is referred to by graph 1"):
        new.free()
    graph.replay()
    np.testing.assert_array_equal(new.numpy(), np.ones(4))
    graph.close()
    new.free()
    with pytest.raises(nx.DeviceMemoryError, match="was freed"):
        rt.launch(launch)
    launch.set(0, rt.zeros((4,), nx.float32).ptr)
    assert launch.operands == ()


def test_a_value_that_is_refused_leaves_the_tensor_in_place(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with pytest.raises(nx.LaunchError, match="argument 'x'"):
        launch.set(0, 1.5)
    assert launch.operands == (x,)
    rt.launch(launch)
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


@pytest.mark.parametrize(
    ("value", "divisor", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (2**62, 1, 2**62)]
)
def test_div_up(value: int, divisor: int, expected: int) -> None:
    assert div_up(value, divisor) == expected


# Operands.


def test_a_launch_keeps_its_operands_alive(rt: nx.CudaRuntime) -> None:
    """Memory that only a prepared launch refers to is not handed to somebody else."""
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)
    gc.collect()
    bystander = rt.zeros((4,), nx.float32)
    rt.launch(launch)
    np.testing.assert_array_equal(bystander.numpy(), np.zeros(4))
    np.testing.assert_array_equal(launch.operands[0].numpy(), np.ones(4))


def test_a_freed_tensor_is_refused_when_prepared_and_when_launched(rt: nx.CudaRuntime) -> None:
    """The pool may have given the memory to another tensor already: the launch must not write into that."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    x.free()
    with pytest.raises(nx.DeviceMemoryError, match="was freed"):
        ADD_ONE.prepare(rt, 4, x, 4)
    heir = rt.zeros((4,), nx.float32)
    assert heir.ptr == x.ptr
    with pytest.raises(nx.DeviceMemoryError, match="was freed"):
        rt.launch(launch)
    np.testing.assert_array_equal(heir.numpy(), np.zeros(4))


def test_another_runtime_s_tensor_is_refused(rt: nx.CudaRuntime) -> None:
    with nx.open_runtime(rt.device) as other:
        stranger = other.zeros((4,), nx.float32)
        with pytest.raises(nx.DeviceMemoryError, match="belongs to another runtime"):
            ADD_ONE.prepare(rt, 4, stranger, 4)


# Steady state.


def test_a_prepared_launch_builds_no_objects_in_steady_state() -> None:
    """100 renewals of every kind of argument leave no memory behind, and no ctypes object is made."""
    launch = packed([("p", "ptr"), ("n", "i32"), ("s", "f32")], 1, 2, 3.0)

    def step() -> None:
        for _ in range(100):
            launch.bind(0x1000)
            launch.set(1, 9)
            launch.set(2, 0.5)

    step()
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        step()
        grown = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert grown < 20


def test_launching_leaves_no_objects_behind(rt: nx.CudaRuntime) -> None:
    """Once the driver's queue is full, a hundred launches more allocate nothing that stays."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)

    def step() -> None:
        for _ in range(100):
            rt.launch(launch)
        rt.synchronize()

    step()
    gc.collect()
    before = sys.getallocatedblocks()
    step()
    gc.collect()
    assert sys.getallocatedblocks() - before < 50
    np.testing.assert_array_equal(x.numpy(), np.full(4, 200))
