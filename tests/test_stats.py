"""Statistics print as tables."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.modules import ModuleStats
from nxrt_cuda.ops.attention import AttentionLaunchStats
from nxrt_cuda.ops.dsa_index_select import DsaLaunchStats


@pytest.mark.parametrize(
    "stats", [nx.RuntimeStats(), nx.WorkspaceStats(), ModuleStats(), AttentionLaunchStats(), DsaLaunchStats()], ids=repr
)
def test_every_kind_has_a_title_and_a_line_for_every_field(stats: object) -> None:
    """The values are in one column."""
    title, *lines = str(stats).splitlines()
    assert title == type(stats).TITLE
    names = [f.name for f in fields(stats)]
    assert [line.split()[0] for line in lines] == names
    width = max(map(len, names))
    assert all(line.startswith("  ") and line[2 + width : 4 + width] == "  " for line in lines)


def test_values_print_as_what_they_are() -> None:
    """Seconds with their milliseconds, addresses in hexadecimal."""
    assert "compile_seconds      0.123" in str(nx.RuntimeStats(compile_seconds=0.12345))
    assert str(nx.WorkspaceStats(1, 0, 768, 0x7000)) == (
        "workspace\n  allocations  1\n  releases     0\n  live_bytes   768\n  last_ptr     0x7000"
    )


def test_a_kernel_s_statistics_print(rt: nx.CudaRuntime) -> None:
    q = rt.from_array(np.ones((1, 1, 2, 4), np.float32))
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    kernel.execute([q, q, q], [rt.empty(q.shape, nx.float32)])
    assert "variant      simt" in str(kernel.launch_stats())
    assert str(kernel.workspace_stats()).startswith("workspace\n")
