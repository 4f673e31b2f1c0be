"""What holds for the tests and for the examples in docstrings alike."""

import functools
import gc
import importlib
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.doctest import DoctestItem

import hardconcrete
import hardconcrete_paper

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # torch's cache mixes instruction sets
    folder = os.path.join(tempfile.gettempdir(), f"torchinductor-{os.getuid()}-{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)

gc.disable()  # until all is imported


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples in docstrings leave nothing in the user's cache."""
    if isinstance(request.node, DoctestItem):
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("tmp_path")))


@pytest.fixture(autouse=True, scope="session")
def unwatched_insides() -> Iterator[None]:
    """Coverage does not follow what takes twice as long then, inside torch and matplotlib."""
    import torch  # not above: the process that hands out the tests does without
    from matplotlib.figure import Figure
    from torch._dynamo import convert_frame

    insides = (
        (torch.export, "export"),
        (torch.export.ExportedProgram, "module"),
        (convert_frame, "_compile"),
        (Figure, "savefig"),
    )
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in insides:
            patch.setattr(owner, name, _unwatched(getattr(owner, name)))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Any:
    """Coverage watches how the packages are imported, not what it needs or how tests are found."""
    _import_packages()
    tracer = sys.gettrace()
    sys.settrace(_but_coverage(tracer))
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


@functools.cache
def _import_packages() -> None:
    _unwatched(importlib.import_module)("torch._dynamo")
    for package in (hardconcrete, hardconcrete_paper):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):  # which is a program
                importlib.import_module(module.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked so come first: one process readies the C++ compiler, and no long one is last.

    Those of one network of the zoo are neighbours, for one process to trace it for them all.
    """
    items.sort(key=lambda item: (item.get_closest_marker("early") is None, _network(item)))


def _network(item: pytest.Item) -> str:
    """The network of the zoo that a test is about, if there is one."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given["entry"].name if "entry" in given else ""


def pytest_collection_finish() -> None:
    """What has been imported is no garbage: not to look through it again saves a twentieth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Tests marked so run without coverage; its own ``no_cover`` takes a tenth of a second each."""
    if not item.get_closest_marker("unwatched"):
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(_but_coverage(tracer))
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def unwatched(*args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        sys.settrace(_but_coverage(tracer))
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return unwatched


def _but_coverage(tracer: Any) -> Any:
    """What shall trace instead: coverage misses lines unless one frame stops and starts it."""
    return None if type(tracer).__module__.startswith("coverage") else tracer
