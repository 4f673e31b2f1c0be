import torch

from hardconcrete.cost.index_sets import IndexSets, Row
from tests.compaction.networks import dense

EXAMPLE = (torch.zeros(2, 4),), {}


def test_an_axis_shrinks_with_its_units() -> None:
    index_sets = IndexSets(dense(), EXAMPLE, {("2.weight", 1): torch.arange(6)})
    assert (
        index_sets.arriving["0.weight", 0]
        == index_sets.arriving["2.weight", 1]
        == Row(0, ((0, 1.0),))
    )
    assert index_sets.apart == index_sets.selected == {}


def test_inputs_are_selected_one_by_one() -> None:
    index_sets = IndexSets(dense(), EXAMPLE, {("0.weight", 1): torch.tensor([0, 1, -1, 2])})
    chosen = index_sets.selected["0.weight", 1]
    assert chosen.base == 1  # the index without a gate
    assert sum(len(index_sets.index_sets[k].indices) for k, _ in chosen.index_sets) == 3
    assert index_sets.selection("0") == (
        index_sets.row(index_sets.relations.roots["0.weight", 1]),
        index_sets.rows[chosen],
    )
