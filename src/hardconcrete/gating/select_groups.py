"""Which groups get gates: those that were found, those that were named, or both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hardconcrete.errors import ArgumentError, SiteError
from hardconcrete.gating.groups import site_groups
from hardconcrete.gating.sites import Site, named_sites
from hardconcrete.units import Analysis, Group, analyze
from hardconcrete.units.group import in_order

AUTO = "auto"


@dataclass(frozen=True)
class Patterns:
    """Names of groups to take and to leave."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, include: str | Sequence[str], exclude: str | Sequence[str]) -> "Patterns":
        """From single patterns or several."""
        for given in (include, exclude):
            if not isinstance(given, Iterable) or any(not isinstance(each, str) for each in given):
                raise ArgumentError(f"include and exclude are names or patterns, not {given!r}")
        as_tuple = [(given,) if isinstance(given, str) else tuple(given) for given in
                    (include, exclude)]  # fmt: skip
        return cls(*as_tuple)

    def chosen(self, found: Analysis) -> list[Group]:
        """The groups whose names fit."""
        for pattern in (*self.include, *self.exclude):
            if not any(_fits(name, pattern) for name in found.names):
                raise SiteError(
                    f"{pattern!r} fits no group; there are {', '.join(found.names) or 'none'}"
                )
        return [
            group
            for group in found
            if (not self.include or any(_fits(group.name, p) for p in self.include))
            and not any(_fits(group.name, p) for p in self.exclude)
        ]


def _fits(name: str, pattern: str) -> bool:
    """A name fits itself, brackets and all."""
    return name == pattern or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class SelectedGroups:
    """What gets gates.

    Args:
        groups: in the order of the bank.
        analysis: what tracing found, if sites="auto".
        overruled: groups that were found and have no gates, with the named site that they overlap.
    """

    groups: tuple[Group, ...]
    analysis: Analysis | None = None
    overruled: Mapping[str, str] = field(default_factory=dict)


def select_groups(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    sites: str | Sequence[Site | str],
    patterns: Patterns,
) -> SelectedGroups:
    """The groups in the order given."""
    several = isinstance(sites, Iterable) and not isinstance(sites, str)
    given: Any = [sites] if sites == AUTO else list(sites) if several else sites
    auto = isinstance(given, list) and AUTO in given
    if not auto:
        if patterns != Patterns():
            raise SiteError("include and exclude choose among units that are found: sites='auto'")
        return SelectedGroups(in_order(site_groups(model, named_sites(model, given))))
    named = [site for site in given if site != AUTO]
    explicit = named_sites(model, named) if named else {}
    found = analyze(model, args, kwargs)
    overruled = _overruled(model, found, explicit)
    chosen = [group for group in patterns.chosen(found) if group.name not in overruled]
    if not chosen and not named:
        raise SiteError(_nothing(found))
    place = list(given).index(AUTO)
    by_site = site_groups(model, explicit)
    groups = in_order([*by_site[:place], *chosen, *by_site[place:]])
    return SelectedGroups(groups, found, overruled)


def _overruled(model: nn.Module, found: Analysis, explicit: Mapping[str, Site]) -> dict[str, str]:
    """Groups that own a dimension which a named site gates, with that site."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    taken = [
        (id(parameters[name]), site.dim, label)
        for label, site in explicit.items()
        for name in site.names
    ]
    return {
        group.name: label
        for group in found
        for axis in group.axes
        for tensor, dim, label in taken
        if axis.tensor in parameters
        and id(parameters[axis.tensor]) == tensor
        and dim in (axis.dim, None)
    }


def _nothing(found: Analysis) -> str:
    reasons = "; ".join(map(str, found.fixed[:3]))
    return (
        f"no units that could be removed were left in {found.model}: {reasons or 'no parameters'}"
    )
