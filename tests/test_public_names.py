"""The public surface: what is exported is what exists, and is documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Any

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
    assert exported <= set(dir(nx))
    public = {name for name in dir(nx) if not name.startswith("_") and not isinstance(getattr(nx, name), ModuleType)}
    assert exported - {"__version__"} == public - {"TYPE_CHECKING"}


def test_what_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nxrt_cuda' has no attribute 'Kernels'"):
        nx.Kernels  # noqa: B018


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


FOR_KERNEL_OBJECTS = {"Allocation", "ShortWay", "TensorMap"}
"""Types of runtime calls that kernel objects make, and programs do not."""


@pytest.mark.parametrize("owner", [nx.CudaRuntime, nx.CapturedGraph, nx.TensorMut, nx.Engine, nx.open_runtime])
def test_what_a_program_is_given_has_a_public_name(owner: Any) -> None:
    """So that it can annotate its own functions with it."""
    members = [owner] if inspect.isfunction(owner) else [v for n, v in vars(owner).items() if not n.startswith("_")]
    functions = [getattr(member, "fget", None) or getattr(member, "__func__", None) or member for member in members]
    results = {str(inspect.get_annotations(f).get("return", "")) for f in functions if inspect.isfunction(f)}
    package = {name for module in MODULES for name in getattr(importlib.import_module(module), "__all__", ())}
    named = set(re.findall(r"[A-Z]\w+", " ".join(results))) & package
    assert named - set(nx.__all__) <= FOR_KERNEL_OBJECTS


def test_handles_print_what_they_are(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((2, 3), nx.float32)
    pending = rt.read_async(x)
    assert repr(pending) == "PendingRead(Float32, shape=(2, 3), not taken yet)"
    pending.numpy()
    assert repr(pending) == "PendingRead(Float32, shape=(2, 3), taken)"
    with rt.fork() as fork, fork.branch():
        assert repr(fork) == "Fork(1 branch(es), open)"
    assert repr(fork) == "Fork(1 branch(es), ended)"
    with rt.trace() as trace:
        rt.fill_zero(x)
        assert repr(trace).endswith(", open)")
    assert repr(trace) == "Trace(2 span(s), closed)"
