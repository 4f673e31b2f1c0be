"""Which groups get gates: those that tracing finds, the sites that you name, or both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hardconcrete.errors import ArgumentError, SiteError
from hardconcrete.gating.groups import site_groups
from hardconcrete.gating.sites import Site, named_sites
from hardconcrete.units import Analysis, Group, analyze
from hardconcrete.units.branches import groups_that_can_go
from hardconcrete.units.group import in_order

AUTO = "auto"


@dataclass(frozen=True)
class Patterns:
    """Names of groups to include and to exclude."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, include: str | Sequence[str], exclude: str | Sequence[str]) -> "Patterns":
        """From one pattern or several of each kind."""
        for value in (include, exclude):
            if not isinstance(value, Iterable) or any(not isinstance(each, str) for each in value):
                raise ArgumentError(f"include and exclude are names or patterns, not {value!r}")
        as_tuples = [(v,) if isinstance(v, str) else tuple(v) for v in (include, exclude)]
        return cls(*as_tuples)

    def matching(self, analysis: Analysis) -> list[Group]:
        """The groups whose names match."""
        for pattern in (*self.include, *self.exclude):
            if not any(_matches(name, pattern) for name in analysis.names):
                raise SiteError(
                    f"{pattern!r} fits no group; there are {', '.join(analysis.names) or 'none'}"
                )
        return [
            group
            for group in analysis
            if (not self.include or any(_matches(group.name, p) for p in self.include))
            and not any(_matches(group.name, p) for p in self.exclude)
        ]


def _matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern. It matches itself, with its brackets."""
    return name == pattern or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class SelectedGroups:
    """What gets gates.

    Args:
        groups: in the order of their gates.
        analysis: what tracing finds in the model; None where only sites are named.
        overruled: traced groups without gates, each with the named site that overlaps it.
    """

    groups: tuple[Group, ...]
    analysis: Analysis | None = None
    overruled: Mapping[str, str] = field(default_factory=dict)

    def that_may_empty(self) -> "SelectedGroups":
        """The same groups, of which those inside of branches may lose all units."""
        names = groups_that_can_go(self.analysis) if self.analysis is not None else frozenset()
        groups = (replace(group, may_empty=group.name in names) for group in self.groups)
        return replace(self, groups=tuple(groups))


def select_groups(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    sites: str | Sequence[Site | str],
    patterns: Patterns,
) -> SelectedGroups:
    """The groups of all sites in their order; ``"auto"`` stands for the traced groups."""
    listed = _as_list(sites)
    if not isinstance(listed, list) or AUTO not in listed:
        if patterns != Patterns():
            raise SiteError("include and exclude select traced groups: they need sites='auto'")
        return SelectedGroups(in_order(site_groups(model, named_sites(model, listed))))
    named = [site for site in listed if site != AUTO]
    named_by_label = named_sites(model, named) if named else {}
    analysis = analyze(model, args, kwargs)
    overruled = _overruled(model, analysis, named_by_label)
    traced = [group for group in patterns.matching(analysis) if group.name not in overruled]
    if not traced and not named:
        raise SiteError(_why_there_are_none(analysis))
    by_site, place = site_groups(model, named_by_label), listed.index(AUTO)
    groups = in_order([*by_site[:place], *traced, *by_site[place:]])
    return SelectedGroups(groups, analysis, overruled)


def _as_list(sites: Any) -> Any:
    """A list of sites. Other values stay as they are; ``named_sites`` refuses them."""
    if sites == AUTO:
        return [AUTO]
    return list(sites) if isinstance(sites, Iterable) and not isinstance(sites, str) else sites


def _overruled(model: nn.Module, analysis: Analysis, named: Mapping[str, Site]) -> dict[str, str]:
    """Traced groups that gate the same dimension as a named site, with that site."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gated = [
        (id(parameters[name]), site.dim, label)
        for label, site in named.items()
        for name in site.names
    ]
    return {
        group.name: label
        for group in analysis
        for axis in group.axes
        for tensor, dim, label in gated
        if axis.tensor in parameters
        and id(parameters[axis.tensor]) == tensor
        and dim in (axis.dim, None)
    }


def _why_there_are_none(analysis: Analysis) -> str:
    reasons = "; ".join(map(str, analysis.fixed[:3])) or "no parameters"
    return f"{analysis.model} has no units that could be removed: {reasons}"
