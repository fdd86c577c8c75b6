"""Importing the package: quick, and nothing of CUDA with it."""

from __future__ import annotations

import os
import subprocess
import sys


def _python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


def test_importing_loads_no_cuda() -> None:
    """No module of cuda, no driver and no compiler, so that it works where there are none."""
    loaded = _python(
        "import sys, nxrt_cuda\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'cuda'])\n"
        "print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'libnvrtc' in line])"
    )
    assert loaded.split("\n") == ["[]", "[]"]


def test_a_host_runtime_loads_no_cuda() -> None:
    """Nor does opening and using the host driver."""
    loaded = _python(
        "import sys, numpy, nxrt_cuda\n"
        "with nxrt_cuda.open_runtime('host') as rt:\n"
        "    assert (rt.from_array(numpy.arange(4)).numpy() == numpy.arange(4)).all()\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'cuda'])\n"
        "print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'libnvrtc' in line])"
    )
    assert loaded.split("\n") == ["[]", "[]"]


def test_importing_works_without_the_cuda_packages() -> None:
    """As on a machine where they cannot be installed."""
    assert _python("import sys; sys.modules['cuda'] = None; import nxrt_cuda; print(nxrt_cuda.__version__)")


def test_importing_is_quick() -> None:
    """Under 0.3 s of processor time with NumPy in it; the best of five, since other work may share the machine."""
    code = "import time; start = time.process_time(); import nxrt_cuda; print(time.process_time() - start)"
    assert min(float(_python(code)) for _ in range(5)) < 0.3
