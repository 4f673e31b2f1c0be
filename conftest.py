"""What holds for the tests and for the examples in docstrings alike."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.doctest import DoctestItem


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Examples in docstrings leave nothing in the user's cache."""
    if isinstance(request.node, DoctestItem):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True, scope="session")
def unwatched_export() -> Iterator[None]:
    """Coverage does not follow ``torch.export`` inside torch, which would take twice as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export, "export", _unwatched(torch.export.export))
        program = torch.export.ExportedProgram
        patch.setattr(program, "module", _unwatched(program.module))
        yield


def pytest_collection_finish() -> None:
    """What has been imported is no garbage: not to look through it again saves a twentieth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


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
