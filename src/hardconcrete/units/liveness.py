"""Which units are dead when some gates are closed, and which others die with them.

A unit is alive if something reads it and something makes it. It is read where an entry of a reader
is open; it is made where an entry of a maker is open, or where zeros become other values on the
way. A dead unit is cut out of all parameters, so another unit may lose its last reader or maker.

``cost.liveness_formulas`` states the same rule as formulas of gates, whose mean has a gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hardconcrete.graph.propagate import LabelledGraph
from hardconcrete.units.analysis import Analysis
from hardconcrete.units.axis import Axis, Place
from hardconcrete.units.group import Group
from hardconcrete.units.relations import Relations


@dataclass
class Liveness:
    """Finds the dead units of a graph.

    Args:
        labelled: the graph of the model without gates.
        relations: what reads and makes its units.
        is_open: which entries of each gated parameter are open, as ``gate_masks`` gives them.
    """

    labelled: LabelledGraph
    relations: Relations
    is_open: dict[str, Tensor]

    def __post_init__(self) -> None:
        self.roots = self.relations.roots
        self.dead: set[int] = set()
        self.revived: set[int] = set()

    def settle(self) -> set[int]:
        """All dead units: repeat until no unit dies because of another."""
        while new := (self._unread() | self._always_zero()) - self.dead:
            self.dead |= new
        return self.dead

    def keeps(self, place: Place) -> Tensor:
        """Which indices of an axis are kept."""
        dead = torch.tensor(sorted(self.dead), dtype=torch.int64)
        return ~torch.isin(self.roots[place], dead)

    def open_along(self, name: str, dim: int) -> Tensor:
        """Which indices of a dimension have an entry that is neither closed nor cut."""
        value = self.labelled.tensors[name]
        if name not in self.is_open:
            return torch.ones(value.shape[dim], dtype=torch.bool)
        entries = self.is_open[name]
        for other in range(len(value.shape)):
            if other != dim and (name, other) in self.roots:
                kept = self.keeps((name, other)).nonzero().flatten()
                if entries.shape[other] > 1:
                    entries = entries.index_select(other, kept)
                elif not len(kept):
                    entries = entries.narrow(other, 0, 0)
        return _rows(entries, dim).any(1).expand(value.shape[dim])

    def _unread(self) -> set[int]:
        """Units whose readers are all closed."""
        read: set[int] = set()
        for (name, dim), roots in self.relations.read.items():
            still_open = self.roots[name, dim][self.open_along(name, dim)]
            read |= roots & set(still_open.tolist())
        return self.relations.removable - read

    def _always_zero(self) -> set[int]:
        """Units that only closed entries make, and whose zeros stay zero."""
        all_shut: dict[int, bool] = {}
        for (name, dim), roots in self.roots.items():
            along = self.open_along(name, dim)
            only_read = self.relations.only_read((name, dim))
            for root, entry_open in zip(roots.tolist(), along.tolist(), strict=True):
                if root in self.relations.removable and root not in only_read:
                    all_shut[root] = all_shut.get(root, True) and not entry_open
        return {root for root, shut in all_shut.items() if shut} - self.relations.zero_lost

    def revive(
        self, analysis: Analysis, least: Mapping[str, int], chance: dict[str, Tensor]
    ) -> None:
        """Bring back the likeliest units of each group, so that it keeps ``least`` of them."""
        for group in analysis:
            roots = analysis.units_by_root[group.name]
            alive = [root for root in roots if root not in self.dead]
            missing = least[group.name] - len(alive)
            if missing > 0:
                scores = self._scores(group, chance)
                best = sorted(range(len(roots)), key=lambda k: -scores[k])
                for k in [k for k in best if roots[k] in self.dead][:missing]:
                    self.dead.discard(roots[k])
                    self.revived.add(roots[k])

    def _scores(self, group: Group, chance: dict[str, Tensor]) -> list[float]:
        """The smallest chance among a unit's makers times the largest among its readers."""
        made, read = torch.ones(group.units), torch.zeros(group.units)
        for axis in group.axes:
            if axis.gated:
                read = torch.maximum(read, _by_unit(axis, group.units, chance))
            else:
                made = torch.minimum(made, _by_unit(axis, group.units, chance))
        return [float(score) for score in made * read]


def _by_unit(axis: Axis, units: int, chance: dict[str, Tensor]) -> Tensor:
    """The largest chance among the entries of each unit along an axis."""
    if axis.tensor not in chance:
        return torch.ones(units)
    entries = chance[axis.tensor].float().cpu()
    dim = 0 if axis.dim is None else axis.dim  # traced axes have one
    return axis.largest(_rows(entries, dim).amax(1), units)


def _rows(entries: Tensor, dim: int) -> Tensor:
    """One row per index of a dimension, with all its entries."""
    return entries.transpose(0, dim).reshape(entries.shape[dim], -1)
