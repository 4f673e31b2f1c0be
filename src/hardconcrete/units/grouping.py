"""Groups from labels: units that own the same axes, in the order in which they are made."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.graph.labels import Reason
from hardconcrete.graph.propagate import LabelledGraph
from hardconcrete.graph.propagation_state import ContractionRecord
from hardconcrete.units.axis import NO_UNIT, Axis, Place
from hardconcrete.units.group import Group
from hardconcrete.units.relations import Relations

INPUT = "input:"
"""Begins the name that stands for an input of the model among the tensors."""

HEAD_KIND = "attention head"
"""The kind of units that products of activations do not mix, if they have several indices."""


@dataclass(frozen=True)
class Fixed:
    """Units that cannot be removed, and why."""

    name: str
    units: int
    reason: Reason

    def __str__(self) -> str:
        return f"{self.name}: {self.units} fixed: {self.reason}"


class Grouping:
    """Groups the units of a labelled graph, and says which ones are fixed.

    Args:
        labelled: the graph.
        relations: what reads and makes its units.
        model: the model that was traced.
        batch: how many examples its inputs have.
    """

    def __init__(
        self, labelled: LabelledGraph, relations: Relations, model: nn.Module, batch: int
    ) -> None:
        self.batch = batch
        self.relations = relations
        self.labels = labelled.state.labels
        self.contractions = labelled.state.contractions
        self.reasons = self.labels.why_fixed()
        self.shapes = {name: value.shape for name, value in labelled.tensors.items()}
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.made: dict[int, tuple[int, str, int]] = {}  # by unit: order, producer, position
        self.makers: dict[Place, tuple[str, Tensor]] = {}
        self.shares: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.attention: dict[int, str] = {}  # by unit: the module that multiplies activations
        for order, contraction in enumerate(self.contractions):
            self._note(order, contraction)
        for (name, dim), roots in relations.roots.items():
            if name.startswith(INPUT):
                self._note_made(-1, (name, dim), roots)

    def _note(self, order: int, contraction: ContractionRecord) -> None:
        """Where units are first made, and their share of the multiply-adds there."""
        for place, labels in contraction.makes:
            self._note_made(order, place, self.labels.find(labels).flatten())
        for labels in contraction.parts:
            for root, count in _counted(self.labels.find(labels)):
                self.shares[root].append((order, count / labels.numel()))
        for labels in contraction.heads:
            for root in self.labels.find(labels).unique().tolist():
                self.attention.setdefault(root, contraction.module)

    def _note_made(self, order: int, place: Place, roots: Tensor) -> None:
        name = producer(place[0])
        self.makers.setdefault(place, (name, roots))
        for position, root in enumerate(roots.tolist()):
            self.made.setdefault(root, (order, name, position))

    def groups(self) -> tuple[Group, ...]:
        """Units with the same axes, in the order in which they are made."""
        owned: dict[int, list[tuple[Place, int]]] = defaultdict(list)
        for place, roots in self.relations.roots.items():
            for root, count in _counted(roots):
                owned[root].append((place, count))
        alike: dict[Any, list[int]] = defaultdict(list)
        for root, (order, name, _) in sorted(self.made.items(), key=lambda item: item[1]):
            if root in self.relations.removable:
                alike[order, name, tuple(owned[root])].append(root)
        several = [(key, roots) for key, roots in alike.items() if len(roots) > 1]
        names = [self._name(key[1], units) for key, units in several]
        names = self._named_by_attention(names, several)
        groups = []
        for name, (key, units) in zip(names, several, strict=True):
            order, _, places = key
            kind = "input feature" if order < 0 else self.contractions[order].kind
            kind = HEAD_KIND if self._heads(key, units) else kind
            groups.append(self._group(name, kind, [place for place, _ in places], units))
        return tuple(groups)

    def _named_by_attention(
        self, names: list[str], several: list[tuple[Any, list[int]]]
    ) -> list[str]:
        """Call heads by their attention module, where that name is free and means one group."""
        modules = [
            self.attention[units[0]] if self._heads(key, units) else "" for key, units in several
        ]
        taken = Counter([*modules, *names])
        return [
            module if module and taken[module] == 1 else name
            for name, module in zip(names, modules, strict=True)
        ]

    def _heads(self, key: Any, roots: list[int]) -> bool:
        """Whether these units are heads: some parameter has several indices for each."""
        return roots[0] in self.attention and any(count > 1 for _, count in key[2])

    def _name(self, producer_name: str, roots: list[int]) -> str:
        """The producer, with a range where it makes several groups."""
        made = {
            root
            for name, found in self.makers.values()
            if name == producer_name
            for root in found.tolist()
        }
        if made - self.reasons.keys() <= set(roots):
            return producer_name
        first, last = self.made[roots[0]][2], self.made[roots[-1]][2]
        return f"{producer_name}[{first}:{last + 1}]"

    def _group(self, name: str, kind: str, places: list[Place], roots: list[int]) -> Group:
        numbers = {root: number for number, root in enumerate(roots)}
        axes = tuple(
            Axis(
                tensor,
                dim,
                _numbered(self.relations.roots[tensor, dim], numbers),
                gated=roots[0] in self.relations.read.get((tensor, dim), ()),
            )
            for tensor, dim in places
            if not tensor.startswith(INPUT)
        )
        return Group(
            name, kind, len(roots), axes, self._parameters_of_one(axes), self._macs_of_one(roots[0])
        )

    def _parameters_of_one(self, axes: tuple[Axis, ...]) -> int:
        """Entries of parameters that unit 0 owns along one axis or another."""
        others: dict[str, int] = {}
        for axis in axes:
            if axis.tensor in self.parameters:
                size = len(axis.units)
                entries = others.get(axis.tensor, prod(self.shapes[axis.tensor]))
                others[axis.tensor] = entries // size * (size - int((axis.units == 0).sum()))
        return sum(prod(self.shapes[name]) - entries for name, entries in others.items())

    def _macs_of_one(self, root: int) -> int:
        """Multiply-adds per example that need the unit while all other units are there."""
        rest: dict[int, float] = defaultdict(lambda: 1.0)
        for order, share in self.shares[root]:
            rest[order] *= 1 - share
        gone = (self.contractions[order].macs * (1 - part) for order, part in rest.items())
        return round(sum(gone) / self.batch)

    def fixed(self) -> tuple[Fixed, ...]:
        """The units that parameters make and that cannot be removed, by reason."""
        counts: Counter[tuple[str, Reason]] = Counter()
        for name, roots in self.makers.values():
            for root, count in _counted(roots):
                if root in self.reasons:
                    counts[name, self.reasons[root]] += count
        return tuple(Fixed(name, units, reason) for (name, reason), units in counts.items())


def _counted(roots: Tensor) -> Iterator[tuple[int, int]]:
    """Each unit with the number of its indices."""
    units, counts = roots.unique(return_counts=True)
    return zip(units.tolist(), counts.tolist(), strict=True)


def _numbered(roots: Tensor, numbers: dict[int, int]) -> Tensor:
    """The number of the unit at each index."""
    units = [numbers.get(root, NO_UNIT) for root in roots.tolist()]
    return torch.tensor(units, dtype=torch.int64)


def producer(parameter: str) -> str:
    """The module that a weight stands for. Another raw parameter stands for itself."""
    path, _, attribute = parameter.partition(".parametrizations.")
    if attribute:
        return path
    path, _, attribute = parameter.rpartition(".")
    return path if attribute == "weight" and path else parameter
