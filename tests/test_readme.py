"""The Python of the README runs, and what is marked as not working yet really does not."""

import re
from pathlib import Path

import pytest

import hardconcrete as hc

README = Path(__file__).parents[1].joinpath("README.md").read_text()
BLOCK = re.compile(r"(<!-- not yet -->\n)?```python\n(.*?)```", re.DOTALL)
BLOCKS = [(bool(mark), code) for mark, code in BLOCK.findall(README)]


def test_there_is_something_to_run() -> None:
    assert any(not pending for pending, _ in BLOCKS)


@pytest.mark.parametrize("code", [code for pending, code in BLOCKS if not pending])
def test_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("code", [code for pending, code in BLOCKS if pending])
def test_a_marked_block_still_waits_for_something(code: str) -> None:
    names = set(re.findall(r"\bhc\.(\w+)", code))
    assert names - set(hc.__all__), "everything in this block exists: remove its mark"
