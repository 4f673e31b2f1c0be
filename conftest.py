"""Examples in docstrings leave nothing in the user's cache."""

from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache that is thrown away."""
    if isinstance(request.node, DoctestItem):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
