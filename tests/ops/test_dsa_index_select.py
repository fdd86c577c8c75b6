"""DsaIndexSelect on the host driver: what it selects, launches, counts and keeps."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.dsa_geometry import Dims, WorkspaceLayout
from nxrt_cuda.ops.dsa_index_select import (
    DsaIndexSelectFactory,
    DsaLaunchStats,
    dsa_launch_stats,
    dsa_workspace_stats,
    reset_dsa_launch_stats,
    reset_dsa_workspace_stats,
)
from nxrt_cuda.testing import count
from tests.dsa_cases import DTYPES, DsaCase, DsaOperands, biased, closed_form_cases, random_case, random_cases, run


@pytest.fixture
def case() -> DsaCase:
    """A few rows of a few keys in f16."""
    shape = {"batch": 2, "q_seq": 9, "heads": 4, "head_dim": 8, "key_seq": 150}
    return random_case(1, DTYPES[1], **shape, top_k=20, mask="causal")


@pytest.mark.parametrize("case", closed_form_cases(), ids=str)
def test_closed_forms(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """The answers that follow from the definition, through both launches and the workspace."""
    np.testing.assert_array_equal(run(rt, case), case.expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_random_shapes_equal_the_oracle(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """Mixed shapes, values and masks, one kernel object each."""
    for case in random_cases(7, dtype, count=40, cells=40_000):
        np.testing.assert_array_equal(run(rt, case), case.expected, err_msg=case.name)


def test_recorded_encoder_tensors(rt: nx.CudaRuntime, data) -> None:
    """Keys and queries of a real encoder, with its padding mask."""
    with np.load(data / "sentence_dsa.npz") as archive:
        query, key, weights, bias = (archive[name] for name in ("query", "key", "weights", "attention_bias"))
        lengths = archive["lengths"]
    empty = np.empty((*bias.shape[:3], 16), np.int64)
    case = DsaCase("encoder", query, key, weights, bias, 16, empty, scale=32**-0.5)
    selected = run(rt, case)
    np.testing.assert_array_equal(selected, case.oracle())
    for row, length in zip(selected, lengths, strict=True):
        assert row.max() < length


def test_one_kernel_object_serves_changing_shapes(rt: nx.CudaRuntime) -> None:
    """Shapes may change from call to call, more of them than prepared launches are kept."""
    kernel = None
    for keys in (*range(1, 80), 3, 40):
        case = biased("ramp", np.arange(keys), 5, np.arange(keys)[-5:])
        kernel = kernel or nx.create_kernel(rt, case.node)
        operands = DsaOperands(rt, case)
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(operands.selected(), case.expected)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_any_grid_gives_the_same_result(rt: nx.CudaRuntime, case: DsaCase, limit: int) -> None:
    """A bounded grid does the same work in strides."""
    kernel = DsaIndexSelectFactory(rt).create_kernel_with_grid_limit(case.node, limit)
    operands = DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    np.testing.assert_array_equal(operands.selected(), case.expected)
    stats = kernel.launch_stats()
    assert (stats.last_score_grid_x, stats.last_selection_grid_x) == (min(limit, 8), limit)


def test_reruns_are_identical(rt: nx.CudaRuntime) -> None:
    """25 runs over many ties select the same."""
    case = next(case for case in closed_form_cases() if case.name == "715-at-one-rest-at-zero")
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    for _ in range(25):
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(operands.selected(), case.expected)


# Statistics.


def test_launch_statistics(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Every execution is two launches, counted by the kernel object and for the process."""
    reset_dsa_launch_stats()
    first, second = nx.create_kernel(rt, case.node), nx.create_kernel(rt, case.node)
    operands = DsaOperands(rt, case)
    for kernel in (first, second, second):
        kernel.execute(operands.inputs, [operands.output])
    # 2 batches x ceil(9 / 8) row tiles x ceil(150 / 128) key tiles; 2 x 9 rows.
    assert first.launch_stats() == DsaLaunchStats(1, 1, 1, 8, 18)
    assert second.launch_stats() == DsaLaunchStats(2, 2, 2, 8, 18)
    assert dsa_launch_stats() == DsaLaunchStats(3, 3, 3, 8, 18)
    reset_dsa_launch_stats()
    assert dsa_launch_stats() == DsaLaunchStats()
    assert second.launch_stats().executions == 2


@pytest.mark.parametrize(
    ("name", "stats"),
    [
        ("no-rows", DsaLaunchStats(executions=1)),
        ("no-batch", DsaLaunchStats(executions=1)),
        ("no-keys", DsaLaunchStats(1, 0, 1, 0, 6)),
    ],
)
def test_empty_calls_are_counted_and_launch_what_there_is(rt: nx.CudaRuntime, name: str, stats: DsaLaunchStats) -> None:
    """Without rows nothing is launched; without keys the padding is."""
    case = next(case for case in closed_form_cases() if case.name == name)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    with count(rt) as seen:
        kernel.execute(operands.inputs, [operands.output])
    assert kernel.launch_stats() == stats
    assert seen.launches == stats.selection_launches
    np.testing.assert_array_equal(operands.selected(), case.expected)


def test_a_warmed_call_allocates_copies_and_compiles_nothing(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """After the first call of a shape there are two launches and nothing else, no wait included."""
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with count(rt) as seen:
        kernel.execute(operands.inputs, [operands.output])
    assert (seen.launches, seen.allocations, seen.htod_copies, seen.dtoh_copies, seen.compiles) == (2, 0, 0, 0, 0)
    assert seen.stats.synchronizations == 0


def test_workspace_grows_and_never_shrinks(rt: nx.CudaRuntime) -> None:
    """A larger shape replaces the workspace, a smaller one reuses it; the statistics tell which."""
    gc.collect()
    assert reset_dsa_workspace_stats()
    kernel = None
    history = []
    for keys in (100, 300, 200):
        case = biased("ramp", np.arange(keys), 5, np.arange(keys)[-5:])
        kernel = kernel or nx.create_kernel(rt, case.node)
        operands = DsaOperands(rt, case)
        kernel.execute(operands.inputs, [operands.output])
        history.append(kernel.workspace_stats())
    small, large = (WorkspaceLayout.of(Dims(1, 1, 1, 1, keys)).nbytes for keys in (100, 300))
    assert [(s.allocations, s.releases, s.live_bytes) for s in history] == [(1, 0, small), (2, 1, large), (2, 1, large)]
    assert history[0].last_ptr != history[1].last_ptr == history[2].last_ptr
    assert dsa_workspace_stats() == history[2]


def test_workspace_statistics_are_not_reset_while_bytes_are_live(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """A reset would lose what is still held; it works once the last kernel object is gone."""
    gc.collect()
    assert reset_dsa_workspace_stats()
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    assert not reset_dsa_workspace_stats()
    assert dsa_workspace_stats().allocations == 1
    del kernel
    gc.collect()
    assert dsa_workspace_stats().releases == 1
    assert reset_dsa_workspace_stats()
    assert dsa_workspace_stats() == nx.WorkspaceStats()


def test_two_kernel_objects_do_not_share_a_workspace(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Each has an address of its own."""
    kernels = [nx.create_kernel(rt, case.node) for _ in range(2)]
    operands = DsaOperands(rt, case)
    for kernel in kernels:
        kernel.execute(operands.inputs, [operands.output])
    assert len({kernel.workspace_stats().last_ptr for kernel in kernels}) == 2


def test_the_caller_owes_no_workspace(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """The kernel owns its scratch; asking validates the shapes."""
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    metadata = [view.metadata for view in operands.inputs]
    assert kernel.workspace_requirement(metadata) == nx.WorkspaceRequirement.NONE
    assert not any(kernel.supports_strided_input(index) for index in range(4))
    with pytest.raises(nx.KernelError, match="expected 4 input metadata entries, got 3"):
        kernel.workspace_requirement(metadata[:3])


def test_any_failing_driver_call_leaves_everything_as_it_was(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Each call that a growing execution makes to the driver is failed once: the counters and the workspace
    in use stay, nothing leaks, and the next execution works."""
    small = biased("ramp", np.arange(9), case.top_k, np.arange(9))
    calls_to_fail = 0
    while True:
        kernel = nx.create_kernel(rt, case.node)
        warm, operands = DsaOperands(rt, small), DsaOperands(rt, case)
        kernel.execute(warm.inputs, [warm.output])
        rt.synchronize()
        gc.collect()
        before = kernel.workspace_stats().live_bytes, kernel.launch_stats()
        calls_to_fail += 1
        with rt._driver.fail_call(n=calls_to_fail, error="CUDA_ERROR_INVALID_VALUE") as failure:
            refused = False
            try:
                kernel.execute(operands.inputs, [operands.output])
            except nx.DriverError as error:
                refused = error.name == "CUDA_ERROR_INVALID_VALUE"
        if not failure.fired:
            break
        gc.collect()
        if refused:
            assert (kernel.workspace_stats().live_bytes, kernel.launch_stats()) == before
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(operands.selected(), case.expected)
    assert calls_to_fail > 3


def test_threads_share_a_kernel_object(rt: nx.CudaRuntime) -> None:
    """The two launches of a call stay together, whoever else uses the workspace."""
    cases = [random_case(seed, DTYPES[0], q_seq=4, heads=2, head_dim=4, key_seq=60, top_k=9) for seed in range(4)]
    cases = [replace(case, scale=0.5, weights_scale=1.0) for case in cases]
    cases = [replace(case, expected=case.oracle()) for case in cases]
    kernel = nx.create_kernel(rt, cases[0].node)

    def work(case: DsaCase) -> None:
        operands = DsaOperands(rt, case)
        for _ in range(20):
            operands.clear()
            kernel.execute(operands.inputs, [operands.output])
            np.testing.assert_array_equal(operands.selected(), case.expected)

    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(work, case) for case in cases]:
            done.result()
    assert kernel.launch_stats().executions == 80
    assert kernel.workspace_stats().allocations == 1
