"""Groups: the units that share a name, and where their gates lie in the bank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hardconcrete.errors import SiteError
from hardconcrete.gating.site import Site


@dataclass(frozen=True)
class Group:
    """Units that are gated alike, one gate each.

    Args:
        name: the string the site was given as, or ``Site.label``.
        site: the parameters and the dimension that its gates multiply.
        units: number of gates.
        size: |g|, the number of weights that one gate multiplies.
        index: its place among the groups.
        start: place of its first gate in the bank.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":out"])
        >>> group = gated.groups[0]
        >>> group.name, group.units, group.size         # 4 weights and a bias per output
        (':out', 3, 5)
    """

    name: str
    site: Site
    units: int
    size: int
    index: int
    start: int

    @property
    def slice(self) -> slice:
        """Its part of anything that has one entry per gate."""
        return slice(self.start, self.start + self.units)

    def squared_norms(self, model: nn.Module) -> Tensor:
        """Sum of squares of the ungated weights of each unit, the inner sum of eq. 17."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return sum(  # type: ignore[return-value]
            parameters[name].float().square().flatten()
            if self.site.dim is None
            else parameters[name]
            .float()
            .square()
            .transpose(0, self.site.dim)
            .reshape(self.units, -1)
            .sum(1)
            for name in self.site.names
        )


def make_groups(model: nn.Module, sites: Mapping[str, Site]) -> tuple[Group, ...]:
    """One group per site, their gates one after the other."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups: list[Group] = []
    start = 0
    for name, site in sites.items():
        total = sum(parameters[parameter].numel() for parameter in site.names)
        first = parameters[site.names[0]]
        units = first.numel() if site.dim is None else first.shape[site.dim]
        if site.dim is None and total != units:
            raise SiteError(f"{name}: single weights are gated for one parameter at a time")
        groups.append(Group(name, site, units, total // units, len(groups), start))
        start += units
    return tuple(groups)


def per_group(groups: tuple[Group, ...], value: Any, what: str) -> list[Any]:
    """A setting for each group, from one value or a mapping by the names of the groups."""
    if not isinstance(value, Mapping):
        return [value] * len(groups)
    names = [group.name for group in groups]
    for wrong in set(names) ^ set(value):
        problem = "is not a group" if wrong in value else "has no entry"
        raise SiteError(f"{what}: {wrong!r} {problem}; the groups are {', '.join(names)}")
    return [value[name] for name in names]
