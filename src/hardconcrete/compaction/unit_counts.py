"""Numbers of units that modules keep, such as ``self.num_heads``, where no shape depends on them.

The constructor shows which they are: built from a configuration with another number of units, a
module keeps that number.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from hardconcrete.compaction.plan import KeptUnits
from hardconcrete.compaction.size_attributes import is_of_torch
from hardconcrete.units.configuration import (
    Numbers,
    Places,
    build,
    is_configuration,
    moved_places,
    shapes_of,
    values_in,
)
from hardconcrete.units.uniform import place


def unit_counts(
    module: nn.Module, config: Any, groups: Mapping[str, KeptUnits], cut: Places
) -> tuple[Numbers, Numbers]:
    """New numbers of the configuration, and new integers of modules by path and name.

    A configuration gets a number where all groups agree; a module gets that of its group.

    Args:
        module: the dense module.
        config: its configuration.
        groups: the units that stay, by name of each group inside the module.
        cut: the dimensions that lose indices. A number that moves others counts no units.
    """
    numbers: Numbers = {}
    attributes: Numbers = {}
    for name, found in _counts(module, config, groups):
        exact = all(each.units == each.before for each in found.values())
        if exact and _in_any_layer(_moved(module, config, name)) <= _in_any_layer(cut):
            attributes |= _changes(found)
            numbers |= _agreed(name, found)
    return numbers, attributes


def multiple_counts(
    module: nn.Module, config: Any, groups: Mapping[str, KeptUnits]
) -> Iterator[tuple[Numbers, Numbers]]:
    """The same for each number that is a multiple of the units: perhaps the number of query heads.

    Or it is something else: try the forward.
    """
    for name, found in _counts(module, config, groups):
        if any(each.units != each.before for each in found.values()):
            yield _agreed(name, found), _changes(found)


def counts_of_layers(
    module: nn.Module, config: Any, groups: Mapping[str, KeptUnits]
) -> Iterator[Numbers]:
    """Numbers for configurations of the layers' own: their forwards may read them there."""
    holders = {path: group for name, group in groups.items() for path in _holders(module, name)}
    nodes = {"": config, **{k: v for k, v in values_in(config).items() if is_configuration(v)}}
    for node in nodes.values():
        for name, value in vars(node).items():
            found = {
                f"{path}.{attribute}.{name}".lstrip("."): _Count(
                    value, group.units, len(group.kept)
                )
                for path, group in holders.items()
                for attribute, each in vars(module.get_submodule(path)).items()
                if each is node and type(value) is int and value % group.units == 0
            }
            if found:
                yield _changes(found)


def _in_any_layer(places: Places) -> Places:
    """The same without the numbers of layers: of some layers nothing may be cut."""
    return {(place(name), dim) for name, dim in places}


def _moved(module: nn.Module, config: Any, name: str) -> Places:
    built, _ = _with_another(module, config, name, values_in(config)[name])
    return set() if built is None else moved_places(shapes_of(module), shapes_of(built))


@dataclass(frozen=True)
class _Count:
    """An integer of a module, and the units of its group."""

    before: int
    units: int
    kept: int

    @property
    def after(self) -> int:
        return self.before // self.units * self.kept


def _counts(
    module: nn.Module, config: Any, groups: Mapping[str, KeptUnits]
) -> Iterator[tuple[str, dict[str, _Count]]]:
    """For each number of the configuration, the integers of modules that may count units."""
    holders = {path: group for name, group in groups.items() for path in _holders(module, name)}
    units = {group.units for group in holders.values() if len(group.kept) < group.units}
    for name, value in values_in(config).items():
        if type(value) is int and any(value % each == 0 for each in units):
            found = {
                f"{path}.{attribute}".lstrip("."): _Count(
                    value, holders[path].units, len(holders[path].kept)
                )
                for path, attribute in _kept_by_modules(module, config, name, value)
                if path in holders and value % holders[path].units == 0
            }
            if found:
                yield name, found


def _changes(found: Mapping[str, _Count]) -> Numbers:
    return {path: each.after for path, each in found.items() if each.after != each.before}


def _agreed(name: str, found: Mapping[str, _Count]) -> Numbers:
    """The new number of a configuration, where all modules have the same."""
    numbers = {each.after for each in found.values()}
    return {name: numbers.pop()} if len(numbers) == 1 else {}


def _holders(module: nn.Module, group: str) -> Iterator[str]:
    """The module that a group has its name from, or the one around a layer of torch."""
    modules = dict(module.named_modules())
    if group in modules:
        yield group.rpartition(".")[0] if is_of_torch(modules[group]) else group


def _kept_by_modules(
    module: nn.Module, config: Any, name: str, value: int
) -> Iterator[tuple[str, str]]:
    """The integers that follow a number of the configuration: path of the module, and name."""
    built, other = _with_another(module, config, name, value)
    before = dict(module.named_modules())
    for path, made in built.named_modules() if built is not None else ():
        for attribute, number in vars(made).items():
            old = vars(before[path]).get(attribute) if path in before else None
            if type(number) is type(old) is int and (old, number) == (value, other):
                yield path, attribute


def _with_another(
    module: nn.Module, config: Any, name: str, value: int
) -> tuple[nn.Module | None, int]:
    """The module with another value of a number that its class accepts, and this value."""
    for other in (value // 2, 1, 2 * value):
        with suppress(Exception):  # a constructor may fail in any way for numbers that do not fit
            return build(module, config, {name: other}), other
    return None, value
