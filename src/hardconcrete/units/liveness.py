"""Who is dead: units that nothing reads any more, or that are always zero, and what follows."""

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
    """What is known of each unit while the dead are counted.

    Args:
        labelled: the graph of the model without gates.
        relations: what reads and makes its units.
        alive: for every gated parameter which entries are not shut, as ``masks`` has it.
    """

    labelled: LabelledGraph
    relations: Relations
    alive: dict[str, Tensor]

    def __post_init__(self) -> None:
        self.roots = self.relations.roots
        self.dead: set[int] = set()
        self.revived: set[int] = set()

    def settle(self) -> set[int]:
        """All units that are dead, counting again until no death brings another."""
        while new := (self._unread() | self._always_zero()) - self.dead:
            self.dead |= new
        return self.dead

    def keeps(self, place: Place) -> Tensor:
        """Which indices of an axis stay."""
        dead = torch.tensor(sorted(self.dead), dtype=torch.int64)
        return ~torch.isin(self.roots[place], dead)

    def open_along(self, name: str, dim: int) -> Tensor:
        """Which indices along a dimension have an entry that is not shut and not cut."""
        value = self.labelled.tensors[name]
        if name not in self.alive:
            return torch.ones(value.shape[dim], dtype=torch.bool)
        entries = self.alive[name]
        for other in range(len(value.shape)):
            if other != dim and (name, other) in self.roots:
                kept = self.keeps((name, other)).nonzero().flatten()
                if entries.shape[other] > 1:
                    entries = entries.index_select(other, kept)
                elif not len(kept):
                    entries = entries.narrow(other, 0, 0)
        return _each(entries, dim).any(1).expand(value.shape[dim])

    def _unread(self) -> set[int]:
        """Units whose every reader is shut."""
        reached: set[int] = set()
        for (name, dim), roots in self.relations.read.items():
            still_open = self.roots[name, dim][self.open_along(name, dim)]
            reached |= roots & set(still_open.tolist())
        return self.relations.removable - reached

    def _always_zero(self) -> set[int]:
        """Units made of shut parameters alone, with nothing on the way that maps 0 elsewhere."""
        made_of: dict[int, bool] = {}
        for (name, dim), roots in self.roots.items():
            is_open = self.open_along(name, dim)
            only_read = self.relations.only_read((name, dim))
            for root, entry_open in zip(roots.tolist(), is_open.tolist(), strict=True):
                if root in self.relations.removable and root not in only_read:
                    made_of[root] = made_of.get(root, True) and not entry_open
        return {root for root, shut in made_of.items() if shut} - self.relations.disturbed

    def revive(self, analysis: Analysis, least: int, chance: dict[str, Tensor]) -> None:
        """Let every group keep its likeliest units, so that no layer is left with nothing."""
        for group in analysis:
            roots = analysis.units_by_root[group.name]
            alive = [root for root in roots if root not in self.dead]
            if len(alive) < least:
                scores = self._scores(group, chance)
                best = sorted(range(len(roots)), key=lambda k: -scores[k])
                for k in [k for k in best if roots[k] in self.dead][: least - len(alive)]:
                    self.dead.discard(roots[k])
                    self.revived.add(roots[k])

    def _scores(self, group: Group, chance: dict[str, Tensor]) -> list[float]:
        """How likely each unit is to be made and read: by its makers and its likeliest reader."""
        made, read = torch.ones(group.units), torch.zeros(group.units)
        for axis in group.axes:
            if axis.gated:
                read = torch.maximum(read, _by_unit(axis, group.units, chance))
            else:
                made = torch.minimum(made, _by_unit(axis, group.units, chance))
        return [float(score) for score in made * read]


def _by_unit(axis: Axis, units: int, chance: dict[str, Tensor]) -> Tensor:
    """The largest chance among the entries that each unit owns along an axis."""
    if axis.tensor not in chance:
        return torch.ones(units)
    entries = chance[axis.tensor].float().cpu()
    dim = 0 if axis.dim is None else axis.dim  # traced axes have one
    return axis.largest(_each(entries, dim).amax(1), units)


def _each(entries: Tensor, dim: int) -> Tensor:
    """The entries at each index of a dimension, in a row."""
    return entries.transpose(0, dim).reshape(entries.shape[dim], -1)
