"""What holds for the tests and for the examples in docstrings alike."""

import functools
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


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def unwatched(*args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        if not type(tracer).__module__.startswith("coverage"):
            return function(*args, **kwargs)
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return unwatched
