"""Counting executions: sums over plans, those that are gone included, for a kernel object and for the process."""

from __future__ import annotations

import gc

from nxrt_cuda.ops.launch_ledger import LaunchLedger


def test_what_a_child_counts_its_parent_counts_too() -> None:
    """By kind of launch; a plan that launches nothing is an execution all the same."""
    process: LaunchLedger[str] = LaunchLedger(kinds=2)
    first, second = (LaunchLedger(kinds=2, parent=process) for _ in range(2))
    both, none = first.open("both", (3, 4), (5,)), second.open("none", (), ())
    both.executions += 2
    first.executed(both)
    none.executions += 1
    second.executed(none)
    assert first.totals() == ((2, 4, 2), (4, 5), "both")
    assert second.totals() == ((1, 0, 0), (0, 0), "none")
    # The latest blocks of a kind are those of the latest plan that has launched any.
    assert process.totals() == ((3, 4, 2), (4, 5), "none")


def test_plans_that_are_gone_still_count() -> None:
    """Also where Python's collector finds them, and where the kernel object is gone with them."""
    process: LaunchLedger[str] = LaunchLedger(kinds=1)
    kernel = LaunchLedger(kinds=1, parent=process)
    for executions in range(1, 5):
        tally = kernel.open("plan", (7,))
        tally.executions += executions
        cycle = [tally]
        cycle.append(cycle)  # type: ignore[arg-type]
        del tally, cycle
    gc.collect()
    assert kernel.totals()[0] == process.totals()[0] == (10, 10)
    last = kernel.open("last", (7,))
    last.executions += 1
    del kernel, last
    assert process.totals()[0] == (11, 11)


def test_a_reset_starts_from_zero_and_leaves_the_children() -> None:
    """With plans that are open, and with those that are gone before and after it."""
    process: LaunchLedger[str] = LaunchLedger(kinds=1)
    kernel = LaunchLedger(kinds=1, parent=process)
    gone, kept = kernel.open("gone", (1,)), kernel.open("kept", (2,))
    gone.executions += 5
    kept.executions += 7
    kernel.executed(kept)
    del gone
    process.reset()
    assert process.totals() == ((0, 0), (0,), None)
    assert kernel.totals() == ((12, 12), (2,), "kept")
    kept.executions += 1
    assert process.totals()[0] == (1, 1)
    kernel.executed(kept)
    del kept, kernel
    process.last = None
    assert process.totals()[0] == (1, 1)
