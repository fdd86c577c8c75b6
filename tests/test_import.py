"""Importing the package, in a process of its own: quick, and nothing of CUDA with it."""

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
    """No module of cuda, no driver, no compiler and no test tool, so that it works where there are none."""
    loaded = _python(
        "import sys, nxrt_cuda\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'pytest', 'torch', 'cupy')])\n"
        "print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'libnvrtc' in line])"
    )
    assert loaded.split("\n") == ["[]", "[]"]


def test_importing_loads_neither_the_engine_nor_the_compiler() -> None:
    """They are half of the package; the names that lead there are found all the same."""
    loaded = _python(
        "import sys, nxrt_cuda as nx\n"
        "rooms = ('nxrt_cuda.engine', 'nxrt_cuda.ahead_of_time', 'nxrt_cuda.compile', 'nxrt_cuda.program_cache')\n"
        "print([room for room in rooms if room in sys.modules])\n"
        "print(nx.Engine.__name__, nx.precompile.__name__)"
    )
    assert loaded.split("\n") == ["[]", "Engine precompile"]


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
    """Less than twice the processor time of NumPy beside it; the best of five, since others may share the machine."""
    code = (
        "from time import process_time as now\n"
        "start = now(); import numpy, ml_dtypes; theirs = now() - start\n"
        "start = now(); import nxrt_cuda; print((now() - start) / theirs)"
    )
    assert min(float(_python(code)) for _ in range(5)) < 2


def test_opening_a_gpu_that_is_not_there_is_one_clear_error_each_time() -> None:
    """Twice in a row, without hanging; and the default falls back to the host driver."""
    opened = _python(
        "import nxrt_cuda as nx\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        nx.open_runtime('cuda:0').close()\n"
        "        print('there is a GPU')\n"
        "    except nx.NoDeviceError as error:\n"
        "        assert 'open_runtime(\"host\")' in str(error), error\n"
        "        with nx.open_runtime() as rt:\n"
        "            print(rt.device)\n"
    )
    assert opened in ("host\nhost", "there is a GPU\nthere is a GPU")
