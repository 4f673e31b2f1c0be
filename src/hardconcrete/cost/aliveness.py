"""What a unit needs to be alive: formulas of gates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hardconcrete.structure.groups import Place
from hardconcrete.structure.relations import Relations

Clause = frozenset[int]
"""Gates of which one must be open."""

Formula = frozenset[Clause]
"""Clauses that must all hold; the empty one always does."""


class Aliveness:
    """A unit is alive if something reads it and, unless zeros become something, makes it.

    Args:
        relations: who reads and makes whom.
        gates: for the axes that are gated, the gate of every index, or -1.
    """

    def __init__(self, relations: Relations, gates: Mapping[Place, Tensor]) -> None:
        self.relations = relations
        self.gates = gates
        self._read = self._clauses(lambda place: relations.read.get(place, set()))
        self._made = self._clauses(
            lambda place: set(relations.roots[place].tolist()) - relations.only_read(place)
        )

    def _clauses(self, members: Callable[[Place], set[int]]) -> dict[int, Clause]:
        """The gates of all axes of a unit, for units without an axis that has none."""
        gates, free = defaultdict[int, set[int]](set), set[int]()
        for place, roots in self.relations.roots.items():
            own = members(place)
            for root, gate in zip(roots.tolist(), self._gates(place, len(roots)), strict=True):
                if root in own and gate < 0:
                    free.add(root)
                elif root in own:
                    gates[root].add(gate)
        return {root: frozenset(found) for root, found in gates.items() if root not in free}

    def _gates(self, place: Place, size: int) -> list[int]:
        return self.gates[place].tolist() if place in self.gates else [-1] * size

    def unit(self, root: int) -> Formula:
        """What a unit needs."""
        if root not in self.relations.removable:
            return frozenset()
        made = None if root in self.relations.disturbed else self._made.get(root)
        return together(clause for clause in (self._read.get(root), made) if clause is not None)

    def indices(self, place: Place) -> list[Formula]:
        """What each index of an axis needs: its unit, and its own gate."""
        roots = self.relations.roots[place]
        return [
            self.unit(root) if gate < 0 else together([*self.unit(root), frozenset([gate])])
            for root, gate in zip(roots.tolist(), self._gates(place, len(roots)), strict=True)
        ]


def together(clauses: Iterable[Clause]) -> Formula:
    """All of the clauses, without those that another one implies.

    Example:
        >>> [sorted(clause) for clause in together([frozenset([1, 2, 3]), frozenset([2])])]
        [[2]]
    """
    given = set(clauses)
    return frozenset(clause for clause in given if not any(other < clause for other in given))
