"""The built wheel, installed in a fresh environment away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_NO_INDEX = ("Failed to establish a new connection", "No matching distribution found for hatchling", "Read timed out")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; skips where pip cannot reach an index to get the build backend from."""
    directory = tmp_path_factory.mktemp("wheel")
    build = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", directory, ROOT)
    if build.returncode and any(sign in build.stderr for sign in _NO_INDEX):
        pytest.skip(f"hatchling is not to be had: {build.stderr.strip().splitlines()[-1]}")
    assert build.returncode == 0, build.stderr
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel, which finds the dependencies in this one's."""
    environment = tmp_path_factory.mktemp("environment")
    created = run(sys.executable, "-m", "venv", "--without-pip", environment)
    assert created.returncode == 0, created.stderr
    (site,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, and the .pth files in it are not read: no editable checkout comes along.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    installed = run(sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", site, wheel)
    assert installed.returncode == 0, installed.stderr
    return environment / "bin" / "python"


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_RETRIES": "1"}
    arguments = [str(argument) for argument in command]
    return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_wheel_carries_kernels_and_data_and_nothing_else(wheel: Path) -> None:
    """Every kernel source and the demo's recordings are packed; tests, examples and benchmarks are not."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    sources = {path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.cu*")}
    assert sources
    assert {f"nxrt_cuda/{path.as_posix()}" for path in sources} <= packed
    assert {"nxrt_cuda/data/sentence_attention.npz", "nxrt_cuda/data/sentence_dsa.npz", "nxrt_cuda/py.typed"} <= packed
    assert {name.split("/")[0].partition("-")[0] for name in packed} == {"nxrt_cuda"}
    assert not [name for name in packed if "__pycache__" in name]


def test_the_installed_wheel_runs_the_demo(python: Path, tmp_path: Path) -> None:
    """In an empty directory, from the environment's own copy: both systems pass on the packed recordings."""
    where = run(python, "-c", "import nxrt_cuda; print(nxrt_cuda.__file__)", cwd=tmp_path)
    assert python.parents[1] in Path(where.stdout.strip()).parents, where
    demo = run(python, "-m", "nxrt_cuda", "demo", "--device", "host", "--json", cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    assert json.loads(demo.stdout)["passed"] is True


def test_the_installed_wheel_finds_its_own_kernels(python: Path, tmp_path: Path) -> None:
    """The doctor succeeds, and the kernel sources are those in the environment, not the checkout's."""
    doctor = run(python, "-m", "nxrt_cuda", "doctor", "--json", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stderr
    kernels = Path(json.loads(doctor.stdout)["host_driver"]["kernels"])
    assert python.parents[1] in kernels.parents
