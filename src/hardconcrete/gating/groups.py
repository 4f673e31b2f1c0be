"""Groups of named sites, what their gates multiply, and settings by group."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import SiteError
from hardconcrete.gating.sites import Site
from hardconcrete.units import Axis, Group
from hardconcrete.units.group import raw_parameter

WRAPPERS = re.compile(r"_(checkpoint_wrapped_module|fsdp_wrapped_module|orig_mod)\.")
"""The names under which torch's wrappers hold a module."""

SITE_KIND = "named site"
"""The kind of units that you named, which tracing need not find."""


def gate_targets(model: nn.Module, groups: Iterable[Group]) -> list[list[str]]:
    """What the gates of every group multiply, as text for a state dict.

    The text leaves out wrappers, and uses the first name of a parameter, as a state dict does.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":out"])
        >>> gate_targets(gated.model, gated.groups)
        [['bias:0', 'weight:0']]
    """
    named = [*model.named_parameters(remove_duplicate=False)]
    first = {id(parameter): name for name, parameter in reversed(named)}

    def label(group: Group, axis: Axis) -> str:
        parameter = first[id(raw_parameter(model, axis.tensor))]
        part = "" if axis.is_one_to_one else f" ({group.name})"  # others may gate the rest
        return WRAPPERS.sub("", Site(parameter, axis.dim).label + part)

    return [sorted(label(group, axis) for axis in group.gated) for group in groups]


def without_gates(groups: Iterable[Group]) -> dict[str, dict[int, Tensor]]:
    """The indices without a gate, along each gated dimension of each parameter.

    Example:
        >>> axis = Axis("weight", 1, torch.tensor([0, 1, -1, -1]))
        >>> without_gates([Group("a", "neuron", 2, (axis,), parameters=9)])
        {'weight': {1: tensor([2, 3])}}
    """
    free: dict[str, dict[int, Tensor]] = {}
    full: set[str] = set()
    for axis in [axis for group in groups for axis in group.gated]:
        if axis.dim is None or axis.is_one_to_one:
            full.add(axis.tensor)
            continue
        by_dim = free.setdefault(axis.tensor, {})
        before = by_dim.get(axis.dim, torch.ones_like(axis.units, dtype=torch.bool))
        by_dim[axis.dim] = before & (axis.units < 0)
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
        numbers = torch.arange(units)
        numbers = numbers.view(first.shape) if site.dim is None else numbers
        axes = tuple(Axis(parameter, site.dim, numbers) for parameter in site.names)
        groups.append(Group(name, SITE_KIND, units, axes, total // units))
    return groups


def per_group(groups: tuple[Group, ...], value: Any, setting: str) -> list[Any]:
    """A setting for each group, from one value or a mapping by group name."""
    if not isinstance(value, Mapping):
        return [value] * len(groups)
    names = [group.name for group in groups]
    for wrong in set(names) ^ set(value):
        problem = "is not a group" if wrong in value else "has no entry"
        raise SiteError(f"{setting}: {wrong!r} {problem}; the groups are {', '.join(names)}")
    return [value[name] for name in names]
