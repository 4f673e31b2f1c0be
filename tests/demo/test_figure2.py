from pathlib import Path

import pytest

from hardconcrete.demo import figure2


def test_figure2_facts(tmp_path: Path) -> None:
    facts = figure2(tmp_path).facts
    assert facts["mass on {0, 1}"] == pytest.approx(0.4633, abs=1e-4)
    assert facts["mass on {0, 1}"] + facts["mass between"] == pytest.approx(1)
    assert facts["mean"] == pytest.approx(0.5)
    assert facts["largest |average - exact mean| in (b)"] < 0.02


def test_figures_repeat_byte_for_byte(tmp_path: Path) -> None:
    first = figure2(tmp_path / "a", samples=50)
    second = figure2(tmp_path / "b", samples=50)
    for one, other in zip(first.files, second.files, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_svgs_carry_their_labels(tmp_path: Path) -> None:
    svg, _ = figure2(tmp_path, samples=10).files
    text = svg.read_text()
    for label in ("binary concrete, mean", "hard concrete, mass at 0 and 1", "probability mass"):
        assert label in text
