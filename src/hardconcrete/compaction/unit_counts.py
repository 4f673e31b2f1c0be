"""Numbers of units that modules keep, such as ``self.num_heads``, where no shape depends on them.

The constructor shows which they are: built from a configuration with another number of units, a
module keeps that number.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from hardconcrete.compaction.plan import KeptUnits
from hardconcrete.compaction.size_attributes import is_of_torch
from hardconcrete.units.configuration import Numbers, build, values_in


def unit_counts(
    module: nn.Module, config: Any, groups: Mapping[str, KeptUnits]
) -> tuple[Numbers, Numbers]:
    """New numbers of the configuration, and new integers of modules by path and name.

    A configuration gets a number where all groups agree; a module gets that of its group.

    Args:
        module: the dense module.
        config: its configuration.
        groups: the units that stay, by name of the group inside the module.
    """
    numbers: Numbers = {}
    attributes: Numbers = {}
    holders = {path: group for name, group in groups.items() for path in _holders(module, name)}
    counts = {group.units for group in holders.values()}
    for name, value in values_in(config).items():
        if type(value) is int and value > 1 and value in counts:
            found = {
                f"{path}.{attribute}": len(holders[path].kept)
                for path, attribute in _kept_by_modules(module, config, name, value)
                if path in holders and holders[path].units == value
            }
            attributes |= found
            if len({*found.values()}) == 1:
                numbers[name] = found.popitem()[1]
    return numbers, attributes


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
