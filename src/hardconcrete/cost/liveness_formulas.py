"""What a unit needs to be alive: formulas of gates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hardconcrete.units.axis import Place
from hardconcrete.units.relations import Relations

Element = tuple[int, frozenset[int]]
"""A gate, or none, and axes of gated parameters: it counts while one of them is not cut off.

An axis is cut off where nothing is left along another axis of its parameter. Of a parameter with
gates on single weights it is cut off index by index. Without axes it always counts.
"""

Clause = frozenset[Element]
"""Elements of which one must hold: its gate is open, and it counts."""

Formula = frozenset[Clause]
"""Clauses that must all hold; the empty one always does."""

ALWAYS = -1
"""The gate of an index that has none, and the number of an axis that nothing cuts off."""

EACH = -1
"""In place of an axis: every single weight has a gate."""


class Aliveness:
    """A unit is alive if something reads it and, unless zeros become something, makes it.

    Args:
        relations: who reads and makes whom.
        gates: for the axes that are gated, the gate of every index, or -1.

    Attributes:
        places: all axes of gated parameters.
        lines: for those of parameters with gates on single weights, the number of the first index:
            after those of all axes.
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
        """The gates of all axes of a unit, for units without an axis that always has them."""
        found = defaultdict[int, dict[int, set[int]]](lambda: defaultdict(set))
        for place, roots in self.relations.roots.items():
            own = members(place)
            for root, (gate, number) in zip(roots.tolist(), self._gates(place), strict=True):
                if root in own:
                    found[root][number].add(gate)
        return {
            root: clause for root, axes in found.items() if (clause := self._clause(root, axes))
        }

    def _clause(self, root: int, axes: Mapping[int, set[int]]) -> Clause | None:
        """Of the gates of a unit by axis.

        Where all axes have the same ones, as those of whole groups, it is enough to know whether
        all are cut off; single weights need to know it of every unit.
        """
        every = set().union(*axes.values())
        mixed = bool(self.lines) or root not in self.relations.removable
        mixed = mixed or any(own != every for own in axes.values())
        if mixed:
            self._mixed.add(root)
        if ALWAYS in axes.get(ALWAYS, ()) or (every == {ALWAYS} and not mixed):
            return None
        stands = {gate: frozenset(k for k, own in axes.items() if gate in own) for gate in every}
        return frozenset(
            (gate, at if mixed and ALWAYS not in at else frozenset()) for gate, at in stands.items()
        )

    def _gates(self, place: Place) -> list[tuple[int, int]]:
        """The gate of every index of an axis, and the number by which it is cut off."""
        size = len(self.relations.roots[place])
        if place in self.lines:
            return [(ALWAYS, self.lines[place] + k) for k in range(size)]
        gates = self.gates[place].tolist() if place in self.gates else [ALWAYS] * size
        return [(gate, self._numbers.get(place, ALWAYS)) for gate in gates]

    def unit(self, root: int) -> Formula:
        """What a unit needs."""
        if root not in self.relations.removable:
            return frozenset()
        made = None if root in self.relations.disturbed else self._made.get(root)
        return together(clause for clause in (self._read.get(root), made) if clause is not None)

    def indices(self, place: Place) -> list[Formula]:
        """What each index of an axis needs: its unit, and its own gate."""
        roots = self.relations.roots[place].tolist()
        found = []
        for root, (gate, number) in zip(roots, self._gates(place), strict=True):
            at = frozenset([number] if root in self._mixed else [])
            free = gate == ALWAYS and place not in self.lines
            own = [] if free else [frozenset([(gate, at)])]
            found.append(together([*self.unit(root), *own]))
        return found


def together(clauses: Iterable[Clause]) -> Formula:
    """All of the clauses, without those that another one implies.

    Example:
        >>> one, two = (1, frozenset()), (2, frozenset())
        >>> together([frozenset([one, two]), frozenset([two])]) == {frozenset([two])}
        True
    """
    given = set(clauses)
    return frozenset(
        clause
        for clause in given
        if not any(other != clause and _implies(other, clause) for other in given)
    )


def _implies(one: Clause, other: Clause) -> bool:
    """Whether each element of one is in the other, or is one of those that count there."""
    return all(
        any(gate == own and (not at or (at_one and at_one <= at)) for own, at in other)
        for gate, at_one in one
    )
