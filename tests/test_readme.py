"""The Python of the README and the guides runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
README = BLOCK.findall(ROOT.joinpath("README.md").read_text())
GUIDES = ["gates.md", "models.md", "budgets.md", "shrinking.md"]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{guide}" for guide in GUIDES)]


def test_there_is_something_to_run() -> None:
    assert README


@pytest.mark.parametrize("code", README)
def test_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("guide", GUIDES)
def test_the_blocks_of_a_guide_run_in_order(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ROOT.joinpath("docs", guide).read_text()
    code = "\n".join(BLOCK.findall(text))
    assert code
    exec(compile(code, guide, "exec"), {"__name__": "guide"})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
