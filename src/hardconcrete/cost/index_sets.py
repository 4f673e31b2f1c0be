"""The size of every axis, as a sum over sets of indices that are kept by formulas of gates."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.cost.liveness_formulas import EACH, Formula, LivenessFormulas
from hardconcrete.units import Analysis, analyze
from hardconcrete.units.axis import Place
from hardconcrete.units.relations import Relations, selecting_layers

NO_GROUP = -1
"""The group of indices without a removable unit."""


@dataclass(frozen=True)
class IndexSet:
    """Indices of one group.

    Args:
        group: number of the group.
        indices: two numbers of formulas each: when the index is kept, and when its unit is alive.
    """

    group: int
    indices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """The size of an axis.

    Args:
        base: how many of its indices are always kept.
        index_sets: number of each of its index sets, and how often it has it.
    """

    base: int
    index_sets: tuple[tuple[int, float], ...]


class IndexSets:
    """The size of every axis as a ``Row``. All rows become part of the ledger.

    Args:
        model: the model without gates.
        example: its positional and keyword inputs.
        gates: as ``write_ledger`` takes them.
        analysis: of this model with these inputs, if it is known.
        may_empty: names of groups that may lose all units.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        gates: Mapping[Place, Tensor],
        analysis: Analysis | None = None,
        may_empty: Collection[str] = (),
    ) -> None:
        self.model, self.example, self.gates = model, example, gates
        analysis = analyze(model, *example) if analysis is None else analysis
        self.labelled = analysis.labelled
        self.relations = analysis.relations.with_roots(_without_units(gates, analysis))
        self.alive = LivenessFormulas(self.relations, gates)
        self.formulas: dict[Formula, int] = {}
        self.rows: dict[Row, int] = {}
        kept = [float(name not in may_empty) for name in analysis.units_by_root]
        self.units_kept = torch.tensor(kept, dtype=torch.float64)
        self.groups = _units_by_group(analysis, self.relations)
        self.group_of = {root: k for k, roots in enumerate(self.groups) for root in roots}
        self.index_sets = [self._index_set(k, roots) for k, roots in enumerate(self.groups)]
        layers = selecting_layers(model, self.relations)
        self.arriving = {place: self._row(roots) for place, roots in self.relations.roots.items()}
        self.apart = {place: row for place in self.alive.places if (row := self._apart(place))}
        self.selected = {
            place: row
            for place, row in self.apart.items()
            if place[0] in layers and place[1] == 1 and len(self.relations.roots[place]) > 1
        }

    def row(self, roots: Tensor) -> int:
        """The number of the row of an axis with these units."""
        return self.rows[self._row(roots)]

    def selection(self, path: str) -> tuple[int, int] | None:
        """The rows of what arrives at a layer that selects inputs, and of what it reads."""
        for place, row in self._selected_in(path):
            return self.rows[self.arriving[place]], self.rows[row]
        return None

    def _number(self, formula: Formula) -> int:
        return self.formulas.setdefault(formula, len(self.formulas))

    def _index_set(self, group: int, roots: Sequence[int]) -> IndexSet:
        """The units of a group, each kept while it is alive."""
        needs = [self._number(self.alive.unit(root)) for root in roots]
        return IndexSet(group, tuple(zip(needs, needs, strict=True)))

    def _row(self, roots: Tensor) -> Row:
        """The row of an axis that is cut with its units."""
        counts = Counter(self.group_of.get(root, NO_GROUP) for root in roots.tolist())
        base = counts.pop(NO_GROUP, 0)
        times = tuple((k, n / len(self.groups[k])) for k, n in sorted(counts.items()))
        return self._known(Row(base, times))

    def _known(self, row: Row) -> Row:
        self.rows.setdefault(row, len(self.rows))
        return row

    def _apart(self, place: Place) -> Row | None:
        """The row of an axis whose indices are cut one by one, or None."""
        roots = self.relations.roots[place].tolist()
        hosts = [self.alive.unit(root) for root in roots]
        needs = self.alive.indices(place)
        if needs == hosts:
            return None
        parts = defaultdict[int, list[tuple[int, int]]](list)
        for root, need, host in zip(roots, needs, hosts, strict=True):
            if need:
                group = self.group_of.get(root, NO_GROUP)
                parts[group].append((self._number(need), self._number(host)))
        start = len(self.index_sets)
        self.index_sets += [IndexSet(group, tuple(indices)) for group, indices in parts.items()]
        times = tuple((k, 1.0) for k in range(start, len(self.index_sets)))
        return self._known(Row(needs.count(frozenset()), times))

    def _kept(self, place: Place) -> Row:
        return self.selected.get(place, self.arriving[place])

    def _selected_in(self, path: str) -> list[tuple[Place, Row]]:
        """The input axes of a layer that selects inputs, under all names of the layer."""
        module = self.model.get_submodule(path)
        return [
            (place, row)
            for place, row in self.selected.items()
            if self.model.get_submodule(place[0].rpartition(".")[0]) is module
        ]


def _without_units(gates: Mapping[Place, Tensor], analysis: Analysis) -> dict[Place, Tensor]:
    """Roots of gated axes without units, which are axes of size 1 or of a kernel."""
    return {
        place: torch.full_like(numbers, NO_GROUP)
        for place, numbers in gates.items()
        if place[1] != EACH and place not in analysis.relations.roots
    }


def _units_by_group(analysis: Analysis, relations: Relations) -> list[list[int]]:
    """The roots of every group, then each removable root without a group by itself."""
    groups = [*analysis.units_by_root.values()]
    alone = relations.removable - {root for roots in groups for root in roots}
    return groups + [[root] for root in sorted(alone)]
