import torch

from hardconcrete.cost.strands import Row, Strands
from tests.compaction.networks import dense

EXAMPLE = (torch.zeros(2, 4),), {}


def test_an_axis_goes_with_its_units() -> None:
    strands = Strands(dense(), EXAMPLE, {("2.weight", 1): torch.arange(6)})
    assert strands.arriving["0.weight", 0] == strands.arriving["2.weight", 1] == Row(0, ((0, 1.0),))
    assert strands.apart == strands.selected == {}


def test_inputs_are_selected_one_by_one() -> None:
    strands = Strands(dense(), EXAMPLE, {("0.weight", 1): torch.tensor([0, 1, -1, 2])})
    chosen = strands.selected["0.weight", 1]
    assert chosen.base == 1  # the index without a gate
    assert sum(len(strands.strands[k].indices) for k, _ in chosen.strands) == 3
    assert strands.selection("0") == (
        strands.row(strands.relations.roots["0.weight", 1]),
        strands.rows[chosen],
    )
