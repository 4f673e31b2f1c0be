from pathlib import Path

from hardconcrete_paper.figure1 import figure1


def test_figure1_has_a_constant_penalty_only_at_zero(tmp_path: Path) -> None:
    facts = figure1(tmp_path).facts
    assert facts["penalty of theta = 2 at p = 0"] == 1
    assert facts["penalty of theta = 2 at p = 2"] == 4
