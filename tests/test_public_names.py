"""The public surface: what is exported is what exists, and importing it is light."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import nxrt_cuda as nx

MODULES = sorted(
    info.name for info in pkgutil.walk_packages(nx.__path__, "nxrt_cuda.") if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_exports(name: str) -> None:
    """``__all__`` names what exists, and every public class and function that the module defines."""
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [item for item in exported if not hasattr(module, item)] == []
    if not name.startswith("nxrt_cuda.cli"):  # its commands are found by the argument parser, not by import
        assert [item for item in public_definitions(module) if item not in exported] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_and_public_definition_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    undocumented = [
        item
        for item in getattr(module, "__all__", ())
        if (inspect.isclass(value := getattr(module, item)) or inspect.isfunction(value)) and not inspect.getdoc(value)
    ]
    assert not undocumented


def public_definitions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def test_the_package_exports_its_names_and_nothing_else() -> None:
    exported = set(nx.__all__)
    public = {
        name for name, value in vars(nx).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert exported - {"__version__"} == public


def test_every_exported_name_is_exported_by_the_module_that_defines_it() -> None:
    homes: dict[str, set[str]] = {}
    for name in MODULES:
        for item in getattr(importlib.import_module(name), "__all__", ()):
            homes.setdefault(item, set()).add(name)
    assert [name for name in nx.__all__ if name not in homes and name != "__version__"] == []


def test_every_error_of_the_package_has_one_base() -> None:
    from nxrt_cuda import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), nx.NxrtError)
        assert getattr(nx, name) is getattr(errors, name)
    assert issubclass(nx.LaunchOverflowError, OverflowError)


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_importing_loads_no_cuda_library_and_no_test_tool() -> None:
    """It works, and is quick, on a machine that has none of it."""
    done = run(
        "import sys, nxrt_cuda\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('cuda', 'pytest', 'torch', 'cupy')]\n"
        "assert not loaded, loaded\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda' not in maps and 'nvrtc' not in maps\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_host_driver_loads_no_cuda_library() -> None:
    done = run(
        "import sys, nxrt_cuda as nx\n"
        "with nx.open_runtime('host') as rt:\n"
        "    assert not rt.zeros((4,), 'float32').numpy().any()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'cuda']\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_opening_a_gpu_that_is_not_there_is_one_clear_error_each_time() -> None:
    """Twice in a row, without hanging; and the default falls back to the host driver."""
    done = run(
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
    assert done.stderr == ""
    assert done.stdout in ("host\nhost\n", "there is a GPU\nthere is a GPU\n")
