import torch
from torch import Tensor, nn

from hardconcrete.cost.liveness_formulas import LivenessFormulas, together
from hardconcrete.graph.propagate import propagate
from hardconcrete.graph.trace import trace
from hardconcrete.units.relations import Relations
from tests.compaction.networks import dense


def aliveness(model: nn.Module, gates: dict[tuple[str, int], list[int]]) -> LivenessFormulas:
    relations = Relations(propagate(trace(model, (torch.randn(2, 4),)), model))
    return LivenessFormulas(
        relations, {place: torch.tensor(index) for place, index in gates.items()}
    )


def needs(alive: LivenessFormulas, place: tuple[str, int]) -> list[list[list[int]]]:
    """The gates of the clauses, which count in any case."""
    formulas = alive.indices(place)
    assert not any(at for formula in formulas for clause in formula for _, at in clause)
    return [sorted(sorted(gate for gate, _ in clause) for clause in f) for f in formulas]


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


class Heads(nn.Module):
    """Two layers that read the same units, of which a third reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(3, 2)
        self.d = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x).relu()
        return self.c(x), self.d(self.b(x).relu())


def test_a_gate_counts_while_its_layer_has_outputs() -> None:
    gates = {("b.weight", 1): [0, 1, 2], ("c.weight", 1): [3, 4, 5], ("d.weight", 1): [6, 7]}
    alive = aliveness(Heads(), gates)
    at = {place: frozenset([k]) for k, place in enumerate(alive.places)}
    b, c = at["b.weight", 1], at["c.weight", 1]
    assert alive.indices(("a.weight", 0)) == [{frozenset([(k, b), (k + 3, c)])} for k in range(3)]
    assert alive.indices(("b.weight", 1)) == [{frozenset([(k, b)])} for k in range(3)]
    assert needs(alive, ("d.weight", 1)) == [[[6]], [[7]]]  # it alone reads them


def test_a_layer_without_gates_counts_while_it_has_outputs() -> None:
    alive = aliveness(Heads(), {("c.weight", 1): [0, 1, 2], ("b.weight", 0): [3, 4]})
    at = {place: frozenset([k]) for k, place in enumerate(alive.places)}
    b, c = at["b.weight", 1], at["c.weight", 1]
    assert alive.indices(("a.weight", 0)) == [{frozenset([(-1, b), (k, c)])} for k in range(3)]


def test_what_another_clause_implies_is_dropped() -> None:
    def clause(*gates: int) -> frozenset[tuple[int, frozenset[int]]]:
        return frozenset((gate, frozenset()) for gate in gates)

    a, b, c = clause(1), clause(1, 2), clause(3, 4)
    assert together([a, b, c, c]) == {a, c}
    assert together([]) == frozenset()


def test_what_counts_on_fewer_axes_implies_what_counts_on_more() -> None:
    one, both, always = (frozenset([(1, frozenset(at))]) for at in ([5], [5, 6], []))
    assert together([one, both, always]) == {one}
    assert together([both, always]) == {both}
