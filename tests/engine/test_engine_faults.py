"""Every driver call of an engine fails once: a typed error, nothing leaked, and the next run is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.base import CaptureStatus
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.reference import HOST_ENTRIES as REFERENCE_ENTRIES
from nxrt_cuda.reference.dsa_index_select import dsa_index_select
from tests.engine.operators import HOST_ENTRIES, combine
from tests.small_kernels import open_on

REFUSED = "CUDA_ERROR_INVALID_VALUE"
NO_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS"

SHAPES = {"query": ("B", 1, 2, 4), "key": ("B", 30, 4), "weights": ("B", 1, 2), "bias": ("B", 1, 1, 30)}


class Rig:
    """A runtime, and an engine of a key selection, a kernel that declines capture, and one behind it."""

    def __init__(self, driver: HostDriver) -> None:
        self.rt = open_on(driver)
        self.engine = nx.Engine(
            self.rt,
            [
                (nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 5, "scale": 0.5}), list(SHAPES), ["selected"]),
                combine(["query"], "a"),
                combine(["a"], "b", decline="asks the host"),
                combine(["b", "query"], "y"),
            ],
            {name: (nx.float32, shape) for name, shape in SHAPES.items()},
            ["selected", "y"],
            bucket_sizes={"B": (2, 3)},
            max_bytes=20_000,
        )
        self.engine.prepare({"B": 2})
        self.rt.synchronize()

    def check(self, batch: int, *, on_device: bool = False, copy_outputs: bool = False) -> None:
        """Run on new contents, and compare with the oracles."""
        rng = np.random.default_rng(batch)
        arrays = {n: rng.standard_normal((batch, *s[1:]), np.float32) for n, s in SHAPES.items()}
        inputs = {name: self.rt.from_array(array) if on_device else array for name, array in arrays.items()}
        outputs = self.engine.run(inputs, copy_outputs=copy_outputs)
        np.testing.assert_array_equal(outputs["y"].numpy(), 1.125 * arrays["query"])
        np.testing.assert_array_equal(
            outputs["selected"].numpy(), dsa_index_select(*arrays.values(), top_k=5, scale=0.5)
        )


Scenario = Callable[[Rig], None]


def run(rig: Rig) -> None:
    """Replays and the kernel between them, on arrays, on tensors, and with fewer rows."""
    rig.check(2)
    rig.check(2, on_device=True)
    rig.check(1, copy_outputs=True)


def build(rig: Rig) -> None:
    """A second bucket: an arena, kernels, a warm-up that allocates a workspace, and two captures."""
    rig.check(3)


def evict(rig: Rig) -> None:
    """Each bucket pushes out the other."""
    for batch in (3, 2, 3):
        rig.check(batch)


def report(rig: Rig) -> None:
    assert rig.engine.report().captures >= 2
    rig.check(2)


SCENARIOS = [run, build, evict, report]


def each_call_failing(error: str, attempt: Scenario) -> Iterator[tuple[HostDriver, Rig, nx.NxrtError | None]]:
    """``attempt`` on a fresh rig, each time with one call more let pass before one fails, until none does."""
    for n in count(1):
        driver = HostDriver({**REFERENCE_ENTRIES, **HOST_ENTRIES})
        rig = Rig(driver)
        raised: nx.NxrtError | None = None
        with driver.fail_call(n, error) as failure:
            try:
                attempt(rig)
            except nx.NxrtError as caught:
                raised = caught
        if raised is not None:
            assert error in str(raised)
        yield driver, rig, raised
        if not failure.fired:
            assert n > 3, "the attempt makes driver calls"
            return


@pytest.mark.parametrize("error", [REFUSED, NO_MEMORY])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_refused_call_is_a_typed_error_and_the_next_run_is_right(scenario: Scenario, error: str) -> None:
    for driver, rig, _ in each_call_failing(error, scenario):
        assert not rig.rt.is_capturing()
        assert rig.rt.capture_status() is CaptureStatus.NONE
        scenario(rig)
        rig.engine.close()
        rig.rt.close()
        assert not driver.live(), str(driver.live())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_at_any_call_returns_no_data_afterwards(scenario: Scenario) -> None:
    for _, rig, raised in each_call_failing(FAULT, scenario):
        if raised is not None:
            assert isinstance(raised, nx.DeviceFaultError)
            assert not rig.rt.is_capturing()
            with pytest.raises(nx.DeviceFaultError, match="restart the process"):
                rig.check(2)
        rig.rt.close()
        assert rig.rt.is_closed


def test_closing_goes_on_where_a_failed_call_stopped_it() -> None:
    def close(rig: Rig) -> None:
        rig.check(3)
        rig.engine.close()

    for driver, rig, raised in each_call_failing(REFUSED, close):
        if raised is not None:
            rig.engine.close()
        assert rig.engine.is_closed
        assert not rig.engine.report().buckets
        rig.rt.close()
        assert not driver.live(), str(driver.live())
