"""Who makes whom and who reads whom: the relations between units and the axes of parameters."""

from collections import defaultdict

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from hardconcrete.graph.propagate import LabelledGraph
from hardconcrete.units.group import Place, UnitGroup


class Relations:
    """What a walk says of each unit; a unit goes by its root, the smallest of its labels.

    Attributes:
        roots: the unit at every index of every axis.
        read: for the axes that units are summed over, which ones.
        made: for the axes that units come from, which ones.
        users: for every parameter the modules that multiply by it.
        removable: units that something reads and nothing fixes.
        disturbed: units whose zeros do not stay zero on the way.
    """

    def __init__(self, walk: LabelledGraph) -> None:
        labels = walk.state.labels
        self.roots: dict[Place, Tensor] = walk.roots()
        self.read: dict[Place, set[int]] = defaultdict(set)
        self.made: dict[Place, set[int]] = defaultdict(set)
        self.users: dict[str, set[str]] = defaultdict(set)
        for contraction in walk.state.contractions:
            for known, places in ((self.read, contraction.reads), (self.made, contraction.makes)):
                for place, found in places:
                    known[place].update(labels.find(found).flatten().tolist())
                    self.users[place[0]].add(contraction.module)
        self.removable = set().union(*self.read.values()) - labels.why_fixed().keys()
        self.disturbed = labels.zero_lost()

    def only_read(self, place: Place) -> set[int]:
        """The units that an axis reads and does not make."""
        return self.read.get(place, set()) - self.made.get(place, set())

    def units_of(self, group: UnitGroup) -> list[int]:
        """The root of every unit of a group."""
        axis = group.axes[0]
        found = [0] * group.units
        roots = self.roots[axis.tensor, axis.dim]
        for unit, root in zip(axis.units.tolist(), roots.tolist(), strict=True):
            if unit >= 0:
                found[unit] = root
        return found


def selecting_layers(model: nn.Module, relations: Relations) -> dict[str, str]:
    """Layers that can be told to read some of their inputs only, by the name of their weight."""
    holders: dict[int, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] += 1
    found = {}
    for path, module in model.named_modules():
        if _can_select(module) and holders[id(module.weight)] == 1:
            name = f"{path}.weight" if path else "weight"
            users = [model.get_submodule(user) for user in relations.users[name]]
            if all(user is module for user in users):
                found[name] = path
    return found  # whoever else has the weight, or takes it, would get it cut, and not select


def _can_select(module: nn.Module) -> bool:
    plain = type(module).forward in (nn.Linear.forward, nn.Conv2d.forward, nn.Conv1d.forward)
    grouped = getattr(module, "groups", 1) != 1 or isinstance(module, _ConvTransposeNd)
    return plain and not grouped and "weight" in module._parameters
