"""Fused attention on the host driver: what it computes, launches and counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.attention import AttentionLaunchStats, attention_launch_stats, reset_attention_launch_stats
from nxrt_cuda.testing import count
from tests.attention_cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    AttentionCase,
    AttentionOperands,
    averaging,
    check,
    check_case,
    closed_form_cases,
    many_planes,
    oracle_cases,
    random_case,
    run,
    sweep_bounds,
    sweep_errors,
)


@pytest.fixture
def case() -> AttentionCase:
    """A few rows of a few keys, GQA, in f16 with a head size for the tensor cores."""
    return random_case(1, F16, batch=2, heads=4, kv_heads=2, seq_q=5, seq_k=9, head_dim=16, causal=True)


@pytest.mark.parametrize("case", closed_form_cases(), ids=str)
def test_closed_forms(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """The answers that follow from the definition."""
    check_case(run(rt, case), case)


@pytest.mark.parametrize("case", oracle_cases(), ids=str)
def test_oracle_cases(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """Every head size, tile tail and feature, in every dtype."""
    check_case(run(rt, case), case)


@pytest.mark.parametrize("last_row_only", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_magnitude_sweep(rt: nx.CudaRuntime, dtype: np.dtype, last_row_only: bool) -> None:
    """Relative error stays at the rounding of the element type at every length and magnitude."""
    absolute, relative = sweep_errors(lambda case: run(rt, case), dtype, last_row_only=last_row_only)
    assert absolute < sweep_bounds(dtype)[0]
    assert relative < sweep_bounds(dtype)[1]


@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 65537)])
def test_more_planes_than_the_grid_has_in_y(rt: nx.CudaRuntime, batch: int, heads: int) -> None:
    """Planes are laid out along x, where 2**31 - 1 blocks fit."""
    case = many_planes(batch, heads)
    check_case(run(rt, case), case)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_addresses_need_no_more_than_the_elements_alignment(rt: nx.CudaRuntime, offset: int) -> None:
    """Narrower accesses serve operands that are not aligned to 16 bytes."""
    for dtype in DTYPES:
        for seq_q in (1, 70):
            case = random_case(2, dtype, heads=2, seq_q=seq_q, seq_k=100, head_dim=32)
            check_case(run(rt, case, offset=offset), case)


def test_recorded_encoder_tensors(rt: nx.CudaRuntime, data: Path) -> None:
    """Queries, keys and values of a real encoder, with its padding mask."""
    with np.load(data / "sentence_attention.npz") as archive:
        query, key, value, mask = (archive[name] for name in ("query", "key", "value", "attn_mask"))
    case = AttentionCase("encoder", query, key, value, np.empty(query.shape), mask=mask)
    case = replace(case, expected=case.oracle())
    assert np.abs(case.expected).max() > 0.1
    check_case(run(rt, case), case)


def test_optional_inputs_may_be_left_off(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """Three inputs are as good as three and three times None."""
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    kernel.execute(operands.inputs[:3], [operands.output])
    check_case(operands.result(), case)


def test_group_query_attention_is_causal_and_names_its_heads(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """com.microsoft's operator is the same kernel with other defaults."""
    node = nx.Node("GroupQueryAttention", "com.microsoft", {"num_heads": 4, "kv_num_heads": 2})
    kernel, operands = nx.create_kernel(rt, node), AttentionOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    check_case(operands.result(), case)


def test_attributes_reach_the_kernel(rt: nx.CudaRuntime) -> None:
    """Scale, softcap and window as given; a scale of 0, like none, is 1/sqrt(head_dim)."""
    case = random_case(6, F32, seq_q=4, seq_k=12, head_dim=16)
    for changes in ({"scale": 0.0}, {"scale": 2.0}, {"scale": -1.0}, {"softcap": 0.5}, {"window": 3}, {"causal": True}):
        changed = replace(case, **changes)
        expected = replace(changed, scale=changed.scale or None).oracle()
        if changes != {"scale": 0.0}:
            assert np.abs(expected - case.expected).max() > 1e-2
        check_case(run(rt, changed), replace(changed, expected=expected))


def test_lengths_out_of_range_are_clamped_and_reported(rt: nx.CudaRuntime) -> None:
    """The result is that of the clamped lengths; the code stays latched until it is reset."""
    rt.reset_capture_error()
    for dtype, seq_q in ((F32, 2), (F16, 2), (F32, 1), (F16, 1)):
        allowed = averaging("in-range", seq_q, 16, lambda b, i: range(16 * b), batch=2, total=[0, 16], dtype=dtype)
        check_case(run(rt, allowed), allowed)
        assert rt.check_capture_error() == nx.CaptureErrorCode.NONE
        check_case(run(rt, replace(allowed, total=[-(2**31), 2**31 - 1])), allowed)
        assert rt.check_capture_error() == nx.CaptureErrorCode.TOTAL_LENGTH
        check_case(run(rt, replace(allowed, past=[-(2**31), 2**31 - 1])), allowed)
        assert rt.check_capture_error() == nx.CaptureErrorCode.TOTAL_LENGTH | nx.CaptureErrorCode.PAST_LENGTH
        rt.reset_capture_error()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("seq_q", [33, 1])
def test_reruns_and_batch_mates(rt: nx.CudaRuntime, dtype: np.dtype, seq_q: int) -> None:
    """50 runs give the same bits, and a batch element alone gives those of its place in the batch."""
    shape = {"batch": 3, "heads": 4, "kv_heads": 2, "seq_q": seq_q, "seq_k": 300, "head_dim": 64}
    case = random_case(38, dtype, **shape, causal=True, total=[300, 41, 9])
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    first = None
    for _ in range(50):
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        first = operands.result() if first is None else first
        np.testing.assert_array_equal(operands.result(), first)
    check_case(first, case)
    for b in range(3):
        np.testing.assert_array_equal(run(rt, case.alone(b)), first[b : b + 1])


def test_one_kernel_object_serves_changing_shapes(rt: nx.CudaRuntime) -> None:
    """Shapes may change from call to call, more of them than prepared launches are kept."""
    kernel = None
    for seq_k in (*range(1, 80), 3, 40):
        case = random_case(seq_k, F32, seq_q=1, seq_k=seq_k, head_dim=8)
        kernel = kernel or nx.create_kernel(rt, case.node)
        operands = AttentionOperands(rt, case)
        kernel.execute(operands.inputs, [operands.output])
        check_case(operands.result(), case)


def test_the_same_layout_at_other_addresses(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """A prepared launch is renewed with the addresses of each call."""
    kernel = nx.create_kernel(rt, case.node)
    for seed in range(3):
        other = random_case(seed, F16, batch=2, heads=4, kv_heads=2, seq_q=5, seq_k=9, head_dim=16, causal=True)
        operands = AttentionOperands(rt, other)
        kernel.execute(operands.inputs, [operands.output])
        check_case(operands.result(), other)
    assert len(kernel._plans) == 1


# Statistics.


def test_launch_statistics(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """Every execution is one launch, counted by the kernel object and for the process, with its variant."""
    reset_attention_launch_stats()
    first, second = nx.create_kernel(rt, case.node), nx.create_kernel(rt, case.node)
    assert first.launch_stats() == AttentionLaunchStats()
    long = random_case(1, F32, batch=2, heads=4, seq_q=193, seq_k=9, head_dim=16)
    for kernel, called in ((first, case), (second, case), (second, long)):
        operands = AttentionOperands(rt, called)
        kernel.execute(operands.inputs, [operands.output])
    major, minor = rt.capabilities.compute_capability
    hopper = ("sm90", f"Float16, head_dim 16 is a multiple of 8, compute capability {major}.{minor}")
    single = ("bf16x6", f"Float32, head_dim 16 is a multiple of 8, compute capability {major}.{minor}")
    assert first.launch_stats() == AttentionLaunchStats(1, 1, 2 * 4, *hopper)
    assert second.launch_stats() == AttentionLaunchStats(2, 2, 2 * 4 * 2, *single)
    assert attention_launch_stats() == AttentionLaunchStats(3, 3, 2 * 4 * 2, *single)
    reset_attention_launch_stats()
    assert attention_launch_stats() == AttentionLaunchStats()
    assert second.launch_stats().executions == 2


@pytest.mark.parametrize(("batch", "seq_q"), [(0, 3), (2, 0)])
def test_empty_calls_are_counted_and_launch_nothing(rt: nx.CudaRuntime, batch: int, seq_q: int) -> None:
    """Without a batch or without rows there is nothing to write, and nothing to compile."""
    case = random_case(1, F32, batch=batch, heads=2, seq_q=seq_q, seq_k=5, head_dim=4)
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    with count(rt) as seen:
        kernel.execute(operands.inputs, [operands.output])
    stats = kernel.launch_stats()
    assert (stats.executions, stats.launches, stats.last_grid_x) == (1, 0, 0)
    assert (seen.launches, seen.compiles) == (0, 0)
    assert operands.result().size == 0


def test_a_warmed_call_allocates_copies_and_compiles_nothing(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """After the first call of a layout there is one launch and nothing else, no wait included."""
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with count(rt) as seen:
        kernel.execute(operands.inputs, [operands.output])
    assert (seen.launches, seen.allocations, seen.htod_copies, seen.dtoh_copies, seen.compiles) == (1, 0, 0, 0, 0)
    assert seen.stats.synchronizations == 0


def test_the_workspace_is_counters_of_tiles_where_the_kernel_needs_one(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """The caller provides none; the Hopper kernel has 64 counters of its own; asking validates the inputs."""
    kernel, operands = nx.create_kernel(rt, case.in_dtype(F32).node), AttentionOperands(rt, case.in_dtype(F32))
    metadata = [None if view is None else view.metadata for view in operands.inputs]
    kernel.execute(operands.inputs, [operands.output])
    assert kernel.workspace_requirement(metadata) == nx.WorkspaceRequirement.NONE
    assert (kernel.workspace_stats(), kernel.device_graph_resources()) == (nx.WorkspaceStats(), ())
    half = AttentionOperands(rt, case)
    kernel.execute(half.inputs, [half.output])
    kernel.execute(half.inputs, [half.output])
    assert (kernel.workspace_stats().allocations, kernel.workspace_stats().live_bytes) == (1, 256)
    assert len(kernel.device_graph_resources()) == 1
    assert [kernel.supports_strided_input(index) for index in range(6)] == [False, True, True, False, False, False]
    with pytest.raises(nx.KernelError, match="required input 2 \\('value'\\) is absent"):
        kernel.workspace_requirement([*metadata[:2], None])


def test_bindings_take_turns_with_the_tile_counters(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """Launches that may run side by side, on operands of their own, do not count with the same word."""
    kernel = nx.create_kernel(rt, case.node)
    operands = [AttentionOperands(rt, case) for _ in range(3)]
    addresses = []
    for own in (*operands, operands[-1], operands[-1]):
        kernel.execute(own.inputs, [own.output])
        (plan,) = kernel._plans._plans.values()
        addresses.append(plan.prepared.arguments()["tile_counter"])
    # The last of them is made again as it was.
    assert [address - addresses[0] for address in addresses] == [0, 4, 8, 12, 12]


@pytest.mark.parametrize(
    ("dtype", "calls"),
    [
        (F32, {"cuFuncSetAttribute", "cuLaunchKernel"}),
        (F16, {"cuFuncSetAttribute", "cuMemAlloc", "cuMemsetD8Async", "cuTensorMapEncodeTiled", "cuLaunchKernel"}),
    ],
    ids=["bf16x6", "sm90"],
)
def test_any_failing_driver_call_leaves_everything_as_it_was(dtype: np.dtype, calls: set[str]) -> None:
    """Each driver call of a first execution is failed once: nothing is counted, and the next one works."""
    case = random_case(1, dtype, heads=2, seq_q=5, seq_k=9, head_dim=128)
    refusals = []
    failed = 0
    while len(refusals) == failed:
        failed += 1
        with nx.open_runtime("host") as runtime:
            kernel, operands = nx.create_kernel(runtime, case.node), AttentionOperands(runtime, case)
            with runtime._driver.fail_call(n=failed, error="CUDA_ERROR_INVALID_VALUE") as failure:
                try:
                    kernel.execute(operands.inputs, [operands.output])
                except nx.DriverError as error:
                    refusals.append(error)
            was_refused = len(refusals) == failed
            assert failure.fired == was_refused
            assert bool(kernel.capture_support()) != was_refused
            assert kernel.launch_stats().executions == (not was_refused)
            operands.clear()
            kernel.execute(operands.inputs, [operands.output])
            check_case(operands.result(), case)
    assert {error.name for error in refusals} == {"CUDA_ERROR_INVALID_VALUE"}
    assert calls <= {error.call for error in refusals}


def test_threads_share_a_kernel_object(rt: nx.CudaRuntime) -> None:
    """Calls of several threads keep their addresses apart, and those in tensor maps."""
    dtypes = (F32, F16, F32, F16)
    cases = [random_case(seed, dtypes[seed], heads=2, seq_q=4, seq_k=30, head_dim=8) for seed in range(4)]
    kernel = nx.create_kernel(rt, cases[0].node)

    def work(case: AttentionCase) -> None:
        operands = AttentionOperands(rt, case)
        for _ in range(20):
            operands.clear()
            kernel.execute(operands.inputs, [operands.output])
            check_case(operands.result(), case)

    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(work, case) for case in cases]:
            done.result()
    assert kernel.launch_stats().executions == 80


# The tests' own instruments.


def test_the_comparison_sees_nan_infinity_and_error() -> None:
    """Or the tests above would test nothing."""
    expected = np.array([1.0, np.nan, np.inf])
    check(np.array([1.001, np.nan, np.inf]), expected, (1e-2, 0))
    for wrong in ([1.1, np.nan, np.inf], [np.nan, np.nan, np.inf], [1.0, 0.0, np.inf], [1.0, np.nan, -np.inf]):
        with pytest.raises(AssertionError):
            check(np.array(wrong), expected, (1e-2, 0))


def test_the_guards_see_a_stray_write(rt: nx.CudaRuntime) -> None:
    """One element before or after the output is noticed."""
    case = random_case(1, BF16, seq_q=2, seq_k=2, head_dim=3)
    for position in (-1, case.query.size):
        operands = AttentionOperands(rt, case)
        rt.htod(np.zeros(1, np.uint16), operands.output.ptr + 2 * position)
        with pytest.raises(AssertionError, match="written"):
            operands.result()
