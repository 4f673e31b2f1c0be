"""The Python of the README and the guides runs, and what is marked as waiting really waits."""

import re
from pathlib import Path

import pytest

import hardconcrete as hc

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- not yet -->\n)?```python\n(.*?)```", re.DOTALL)
README = [
    (bool(mark), code) for mark, code in BLOCK.findall(ROOT.joinpath("README.md").read_text())
]


def test_there_is_something_to_run() -> None:
    assert any(not pending for pending, _ in README)


@pytest.mark.parametrize("code", [code for pending, code in README if not pending])
def test_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("code", [code for pending, code in README if pending])
def test_a_marked_block_still_waits_for_something(code: str) -> None:
    names = set(re.findall(r"\bhc\.(\w+)", code))
    assert names - set(hc.__all__), "everything in this block exists: remove its mark"


@pytest.mark.parametrize("guide", ["gates.md"])
def test_the_blocks_of_a_guide_run_in_order(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ROOT.joinpath("docs", guide).read_text()
    code = "\n".join(code for _, code in BLOCK.findall(text))
    assert code
    exec(compile(code, guide, "exec"), {"__name__": "guide"})


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/gates.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
