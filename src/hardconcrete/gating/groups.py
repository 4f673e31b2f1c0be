"""Groups: the units that share a name, and where their gates lie in the bank."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import SiteError
from hardconcrete.gating.sites import Site
from hardconcrete.units import UnitGroup

WRAPPERS = re.compile(r"_(checkpoint_wrapped_module|fsdp_wrapped_module|orig_mod)\.")
"""Parts of names by which torch's wrappers hold what they wrap."""


@dataclass(frozen=True, eq=False)
class GateAxis:
    """A dimension of a parameter, and which unit gates each of its indices.

    Args:
        parameter: dotted name.
        dim: the dimension, or None where every single weight is a unit.
        units: the unit of each index, -1 for none; None where index k is unit k.
    """

    parameter: str
    dim: int | None
    units: Tensor | None = None

    def gates(self, own: Tensor) -> Tensor:
        """The gate of each index, from those of the group; 1 where an index has none."""
        if self.units is None:
            return own
        return torch.cat([own, own.new_ones(1)])[self.units.to(own.device)]

    def squared_norms(self, parameter: Tensor, count: int) -> Tensor:
        """Sums of squares by unit."""
        squares = parameter.float().square()
        if self.dim is None:
            return squares.flatten()
        sums = squares.transpose(0, self.dim).reshape(parameter.shape[self.dim], -1).sum(1)
        if self.units is None:
            return sums
        units = self.units.to(sums.device)
        own = units >= 0
        return sums.new_zeros(count).index_add(0, units[own], sums[own])


@dataclass(frozen=True, eq=False)
class Group:
    """Units that are gated alike, one gate each.

    Args:
        name: the string the site was given as, ``Site.label``, or the name of the units found.
        axes: the dimensions of parameters that its gates multiply; for single weights the
            dimension is None.
        units: number of gates.
        size: |g|, the number of weights that one gate multiplies; of units that were found, all
            parameters that go with one.
        index: its place among the groups.
        start: place of its first gate in the bank.
        removed: how many units it had more before ``shrink`` removed them.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":out"])
        >>> group = gated.groups[0]
        >>> group.name, group.units, group.size         # 4 weights and a bias per output
        (':out', 3, 5)
    """

    name: str
    axes: tuple[GateAxis, ...]
    units: int
    size: int
    index: int = -1
    start: int = 0
    removed: int = 0

    @property
    def all_units(self) -> int:
        """The units of the dense model."""
        return self.units + self.removed

    @property
    def slice(self) -> slice:
        """Its part of anything that has one entry per gate."""
        return slice(self.start, self.start + self.units)

    @property
    def keeps_one(self) -> bool:
        """Whether compaction leaves one unit at least; of single weights it leaves none."""
        return all(axis.dim is not None for axis in self.axes)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that its gates multiply."""
        return tuple(dict.fromkeys(axis.parameter for axis in self.axes))

    def squared_norms(self, model: nn.Module) -> Tensor:
        """Sum of squares of the ungated weights of each unit, the inner sum of eq. 17."""
        return sum(  # type: ignore[return-value]
            axis.squared_norms(ungated(model, axis.parameter), self.units) for axis in self.axes
        )


def ungated(model: nn.Module, parameter: str) -> Tensor:
    """A parameter as it is trained; as an attribute it comes with its gates."""
    path, _, name = parameter.rpartition(".")
    return model.get_submodule(path)._parameters[name]  # type: ignore[return-value]


def targets(model: nn.Module, groups: Iterable[Group]) -> list[list[str]]:
    """What the gates of every group multiply, in words that a state can keep.

    Not by what wraps a module or by a second name of a parameter, for states are not, either.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":out"])
        >>> targets(gated.model, gated.groups)
        [['bias:0', 'weight:0']]
    """
    named = [*model.named_parameters(remove_duplicate=False)]
    first = {id(parameter): name for name, parameter in reversed(named)}

    def words(group: Group, axis: GateAxis) -> str:
        parameter = first[id(ungated(model, axis.parameter))]
        part = "" if axis.units is None else f" ({group.name})"  # others may gate the rest
        return WRAPPERS.sub("", Site(parameter, axis.dim).label + part)

    return [sorted(words(group, axis) for axis in group.axes) for group in groups]


def without_gates(groups: Iterable[Group]) -> dict[str, dict[int, Tensor]]:
    """Of gated parameters, what no gate multiplies: along each gated dimension its free indices.

    Example:
        >>> axis = GateAxis("weight", 1, torch.tensor([0, 1, -1, -1]))
        >>> without_gates([Group("a", (axis,), units=2, size=9)])
        {'weight': {1: tensor([2, 3])}}
    """
    free: dict[str, dict[int, Tensor]] = {}
    full: set[str] = set()
    for axis in [axis for group in groups for axis in group.axes]:
        if axis.dim is None or axis.units is None:
            full.add(axis.parameter)
            continue
        own = free.setdefault(axis.parameter, {})
        own[axis.dim] = own.get(axis.dim, torch.ones_like(axis.units) > 0) & (axis.units < 0)
    return {
        name: {dim: mask.nonzero().flatten() for dim, mask in masks.items()}
        for name, masks in free.items()
        if name not in full and all(mask.any() for mask in masks.values())
    }


def site_groups(model: nn.Module, sites: Mapping[str, Site]) -> list[Group]:
    """One group per site."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = []
    for name, site in sites.items():
        total = sum(parameters[parameter].numel() for parameter in site.names)
        first = parameters[site.names[0]]
        units = first.numel() if site.dim is None else first.shape[site.dim]
        if not units:
            raise SiteError(f"{name}: {site.names[0]} is empty, so there is nothing to gate")
        if site.dim is None and total != units:
            raise SiteError(f"{name}: single weights are gated for one parameter at a time")
        axes = tuple(GateAxis(parameter, site.dim) for parameter in site.names)
        groups.append(Group(name, axes, units, total // units))
    return groups


def unit_groups(found: Iterable[UnitGroup]) -> list[Group]:
    """One group for each that was found by tracing."""
    return [
        Group(
            group.name,
            tuple(GateAxis(axis.tensor, axis.dim, _plain(axis.units)) for axis in group.gated),
            group.units,
            group.parameters,
        )
        for group in found
    ]


def _plain(units: Tensor) -> Tensor | None:
    """None where every index is the unit of the same number."""
    return None if torch.equal(units, torch.arange(len(units))) else units


def in_bank(groups: Iterable[Group]) -> tuple[Group, ...]:
    """The groups with their gates one after the other."""
    placed: list[Group] = []
    start = 0
    for group in groups:
        placed.append(replace(group, index=len(placed), start=start))
        start += group.units
    return tuple(placed)


def per_group(groups: tuple[Group, ...], value: Any, what: str) -> list[Any]:
    """A setting for each group, from one value or a mapping by the names of the groups."""
    if not isinstance(value, Mapping):
        return [value] * len(groups)
    names = [group.name for group in groups]
    for wrong in set(names) ^ set(value):
        problem = "is not a group" if wrong in value else "has no entry"
        raise SiteError(f"{what}: {wrong!r} {problem}; the groups are {', '.join(names)}")
    return [value[name] for name in names]
