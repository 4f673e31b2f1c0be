import torch
from torch import nn

from hardconcrete.cost.aliveness import Aliveness, together
from hardconcrete.structure.relations import Relations
from hardconcrete.structure.trace import trace
from hardconcrete.structure.walk import walk
from tests.compaction.networks import dense


def aliveness(model: nn.Module, gates: dict[tuple[str, int], list[int]]) -> Aliveness:
    relations = Relations(walk(trace(model, (torch.randn(2, 4),)), model))
    return Aliveness(relations, {place: torch.tensor(index) for place, index in gates.items()})


def needs(alive: Aliveness, place: tuple[str, int]) -> list[list[list[int]]]:
    return [sorted(map(sorted, formula)) for formula in alive.indices(place)]


def test_a_unit_needs_the_gate_that_reads_it() -> None:
    alive = aliveness(dense(), {("2.weight", 1): [0, 1, 2, 3, 4, -1]})
    assert needs(alive, ("0.weight", 0)) == [[[0]], [[1]], [[2]], [[3]], [[4]], []]
    assert needs(alive, ("0.bias", 0)) == needs(alive, ("2.weight", 1))


def test_a_unit_whose_bias_has_no_gate_is_made_without_its_weights() -> None:
    alive = aliveness(dense(), {("0.weight", 0): [0, 1, 2, 3, 4, 5]})
    assert all(alive.unit(root) == frozenset() for root in alive.relations.removable)


def test_a_gate_on_weight_and_bias_is_one() -> None:
    index = [0, 1, 2, 3, 4, 5]
    alive = aliveness(dense(), {("0.weight", 0): index, ("0.bias", 0): index})
    assert needs(alive, ("2.weight", 1)) == [[[k]] for k in index]


def test_makers_and_readers_are_both_needed() -> None:
    index = [0, 1, 2, 3, 4, 5]
    gates = {("0.weight", 0): index, ("0.bias", 0): index, ("2.weight", 1): [k + 6 for k in index]}
    assert needs(aliveness(dense(), gates), ("0.weight", 0)) == [[[k], [k + 6]] for k in index]


def test_what_another_clause_implies_is_dropped() -> None:
    a, b, c = frozenset([1]), frozenset([1, 2]), frozenset([3, 4])
    assert together([a, b, c, c]) == {a, c}
    assert together([]) == frozenset()
