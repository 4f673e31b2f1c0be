"""When a unit is alive, as a formula of gates.

The rule is that of ``units.liveness``: something reads the unit, and something makes it unless
zeros become other values. Here it is written as a conjunction of clauses, each a disjunction of
gates, so that ``cost.ledger`` can compute its probability and differentiate it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hardconcrete.units.axis import Place
from hardconcrete.units.relations import Relations

Element = tuple[int, frozenset[int]]
"""A gate, or none, and axes of gated parameters. The gate counts while one axis is not cut off.

An axis is cut off where another axis of its parameter is empty. It is cut off index by index where
single weights have gates. Without axes the gate always counts.
"""

Clause = frozenset[Element]
"""One of these elements must hold: its gate is open, and it counts."""

Formula = frozenset[Clause]
"""All of these clauses must hold. The empty formula always holds."""

ALWAYS = -1
"""The gate of an index without a gate, and the number of an axis that is never cut off."""

EACH = -1
"""Stands in place of an axis where every single weight has a gate."""


class LivenessFormulas:
    """The formula of every unit, and of every index of every axis.

    Args:
        relations: what reads and makes each unit.
        gates: the gate of every index of each gated axis, or -1.

    Attributes:
        places: all axes of gated parameters.
        lines: the number of the first index of each axis of a parameter with gates on single
            weights. They follow the numbers of all axes.
    """

    def __init__(self, relations: Relations, gates: Mapping[Place, Tensor]) -> None:
        self.relations = relations
        self.gates = gates
        gated = {name for name, _ in gates}
        self.places = [place for place in relations.roots if place[0] in gated]
        self._numbers = {place: k for k, place in enumerate(self.places)}
        self.lines: dict[Place, int] = {}
        self.numbers = len(self.places)
        for place in self.places:
            if (place[0], EACH) in gates:
                self.lines[place] = self.numbers
                self.numbers += len(relations.roots[place])
        self._mixed = set[int]()
        self._read = self._clauses(lambda place: relations.read.get(place, set()))
        self._made = self._clauses(
            lambda place: set(relations.roots[place].tolist()) - relations.only_read(place)
        )

    def _clauses(self, members: Callable[[Place], set[int]]) -> dict[int, Clause]:
        """The clause of every unit, unless one of its axes always holds."""
        gates_by_axis = defaultdict[int, dict[int, set[int]]](lambda: defaultdict(set))
        for place, roots in self.relations.roots.items():
            units = members(place)
            for root, (gate, number) in zip(roots.tolist(), self._gates(place), strict=True):
                if root in units:
                    gates_by_axis[root][number].add(gate)
        return {
            root: clause
            for root, axes in gates_by_axis.items()
            if (clause := self._clause(root, axes))
        }

    def _clause(self, root: int, axes: Mapping[int, set[int]]) -> Clause | None:
        """The clause of a unit, from its gates by axis.

        Axes with the same gates need no distinction, unless single weights have gates.
        """
        every = set().union(*axes.values())
        mixed = bool(self.lines) or root not in self.relations.removable
        mixed = mixed or any(gates != every for gates in axes.values())
        if mixed:
            self._mixed.add(root)
        if ALWAYS in axes.get(ALWAYS, ()) or (every == {ALWAYS} and not mixed):
            return None
        stands = {
            gate: frozenset(k for k, gates in axes.items() if gate in gates) for gate in every
        }
        return frozenset(
            (gate, at if mixed and ALWAYS not in at else frozenset()) for gate, at in stands.items()
        )

    def _gates(self, place: Place) -> list[tuple[int, int]]:
        """The gate of every index of an axis, and the number of what cuts it off."""
        size = len(self.relations.roots[place])
        if place in self.lines:
            return [(ALWAYS, self.lines[place] + k) for k in range(size)]
        gates = self.gates[place].tolist() if place in self.gates else [ALWAYS] * size
        return [(gate, self._numbers.get(place, ALWAYS)) for gate in gates]

    def unit(self, root: int) -> Formula:
        """When a unit is alive."""
        if root not in self.relations.removable:
            return frozenset()
        made = None if root in self.relations.zero_lost else self._made.get(root)
        return together(clause for clause in (self._read.get(root), made) if clause is not None)

    def indices(self, place: Place) -> list[Formula]:
        """When each index of an axis is kept: its unit is alive, and its gate is open."""
        roots = self.relations.roots[place].tolist()
        formulas = []
        for root, (gate, number) in zip(roots, self._gates(place), strict=True):
            at = frozenset([number] if root in self._mixed else [])
            free = gate == ALWAYS and place not in self.lines
            of_gate = [] if free else [frozenset([(gate, at)])]
            formulas.append(together([*self.unit(root), *of_gate]))
        return formulas


def together(clauses: Iterable[Clause]) -> Formula:
    """The conjunction of clauses, without those that another clause implies.

    Example:
        >>> one, two = (1, frozenset()), (2, frozenset())
        >>> together([frozenset([one, two]), frozenset([two])]) == {frozenset([two])}
        True
    """
    distinct = set(clauses)
    return frozenset(
        clause
        for clause in distinct
        if not any(other != clause and _implies(other, clause) for other in distinct)
    )


def _implies(one: Clause, other: Clause) -> bool:
    """Whether each element of one clause is in the other, or counts there."""
    return all(
        any(gate == twin and (not at or (at_one and at_one <= at)) for twin, at in other)
        for gate, at_one in one
    )
