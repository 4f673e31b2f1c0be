"""The Python of the README and the guides runs."""

import re
from pathlib import Path

import pytest

from hardconcrete.cost.latency import clock

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
GUIDES = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "budgets",
            "gates",
            "guards",
            "importance",
            "latency",
            "methods",
            "models",
            "shrinking",
            "transformers",
        )
    ),
]


@pytest.mark.early
@pytest.mark.unwatched
@pytest.mark.parametrize("guide", GUIDES)
def test_the_blocks_of_a_guide_run_in_order(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "MIN_PASS_SECONDS", 0.0)  # a guide's times are not looked at
    code = "\n".join(BLOCK.findall((ROOT / guide).read_text()))
    assert code
    exec(compile(code, guide, "exec"), {"__name__": "guide"})


@pytest.mark.parametrize(
    "page",
    [
        *GUIDES,
        "CONTRIBUTING.md",
        "docs/reproduction.md",
        "docs/gallery.md",
        "docs/comparison.md",
        "docs/wide.md",
        "results/README.md",
        "experiments/README.md",
        "experiments/notes/mnist.md",
        "experiments/notes/cifar.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
