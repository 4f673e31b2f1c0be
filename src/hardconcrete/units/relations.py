"""Which axes of parameters make units, and which axes read them."""

import copy
from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from hardconcrete.graph.propagate import LabelledGraph
from hardconcrete.units.axis import Place
from hardconcrete.units.group import Group


class Relations:
    """What reads and what makes each unit. A unit is known by its root, its smallest label.

    Attributes:
        roots: the unit at every index of every axis.
        read: the units that are summed over, by axis.
        made: the units that come from an axis, by axis.
        users: the modules that multiply by a parameter, by its name.
        removable: units that something reads and nothing fixes.
        zero_lost: units whose zeros become other values before they are read.
    """

    def __init__(self, labelled: LabelledGraph) -> None:
        labels = labelled.state.labels
        self.roots: dict[Place, Tensor] = labelled.roots()
        self.read: dict[Place, set[int]] = defaultdict(set)
        self.made: dict[Place, set[int]] = defaultdict(set)
        self.users: dict[str, set[str]] = defaultdict(set)
        for contraction in labelled.state.contractions:
            for known, places in ((self.read, contraction.reads), (self.made, contraction.makes)):
                for place, found in places:
                    known[place].update(labels.find(found).flatten().tolist())
                    self.users[place[0]].add(contraction.module)
        self.removable = set().union(*self.read.values()) - labels.why_fixed().keys()
        self.zero_lost = labels.zero_lost()

    def only_read(self, place: Place) -> set[int]:
        """The units that an axis reads and does not make."""
        return self.read.get(place, set()) - self.made.get(place, set())

    def units_of(self, group: Group) -> list[int]:
        """The root of every unit of a group."""
        axis, units = group.axes[0], [0] * group.units
        roots = self.roots[axis.tensor, axis.dim]  # type: ignore[index]  # traced, so it has one
        for unit, root in zip(axis.units.tolist(), roots.tolist(), strict=True):
            if unit >= 0:
                units[unit] = root
        return units

    def with_roots(self, more: Mapping[Place, Tensor]) -> "Relations":
        """A copy that knows more axes."""
        known = copy.copy(self)
        known.roots = {**self.roots, **more}
        return known


def selecting_layers(model: nn.Module, relations: Relations) -> dict[str, str]:
    """Layers that can select some of their inputs, by the name of their weight."""
    holders: dict[int, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] += 1
    found = {}
    for path, module in model.named_modules():
        if _can_select(module) and holders[id(module.weight)] == 1:
            name = f"{path}.weight" if path else "weight"
            users = [model.get_submodule(user) for user in relations.users.get(name, ())]
            if all(user is module for user in users):
                found[name] = path
    return found  # other users of a weight would get it cut, without selecting


def _can_select(module: nn.Module) -> bool:
    plain = type(module).forward in (nn.Linear.forward, nn.Conv2d.forward, nn.Conv1d.forward)
    grouped = getattr(module, "groups", 1) != 1 or isinstance(module, _ConvTransposeNd)
    return plain and not grouped and "weight" in module._parameters
