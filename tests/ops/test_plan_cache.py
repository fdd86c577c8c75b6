"""Prepared launches are kept for the layouts used last."""

from __future__ import annotations

from nxrt_cuda.ops.plan_cache import PlanCache


def test_the_plan_not_used_for_longest_gives_way() -> None:
    """One that is used between new ones stays, however many these are."""
    plans: PlanCache[int, str] = PlanCache()
    plans.keep(-1, "steady")
    for key in range(200):
        assert plans.find(key) is None
        plans.keep(key, f"plan {key}")
        assert plans.find(-1) == "steady"
    assert len(plans) == 64
    assert plans.find(136) is None
    assert [plans.find(key) for key in range(137, 200)] == [f"plan {key}" for key in range(137, 200)]
