"""Groups that keep equally many units, so that one number can describe them in all layers."""

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from hardconcrete.units.configuration import (
    Places,
    built_shapes,
    configurations_in,
    moved_places,
    shapes_of,
    values_in,
)
from hardconcrete.units.group import Group

Classes = Sequence[tuple[str, ...]]
"""Names of groups; those of a class keep equally many units."""


def place(name: str) -> str:
    """A name without the numbers of its layers."""
    return re.sub(r"\d+", "#", name)


def uniform_classes(groups: Iterable[Group], model: nn.Module) -> list[tuple[str, ...]]:
    """The groups at the same place of each layer, with equally many units.

    Their names differ only in numbers: ``layers.0.mlp.up`` and ``layers.1.mlp.up``. Two places are
    one where one number of the model's configuration gives both their sizes, as in a
    configuration with one width for encoder and decoder.

    Example:
        >>> layers = (layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU()))
        >>> import torch, hardconcrete as hc
        >>> model = nn.Sequential(*layers, nn.Linear(4, 2))
        >>> uniform_classes(hc.find_groups(model, torch.zeros(2, 4)), model)
        [('0', '2', '4')]
    """
    classes: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        classes.setdefault((place(group.name), *_kind(group)), []).append(group)
    found = [*classes.values()]
    for moved in _moved_together(model):
        together = [each for each in found if _is_moved(each, moved)]
        if len({_kind(each[0]) for each in together}) == 1 and _covers(together, moved):
            others = [each for each in found if each not in together]
            found = [*others, [group for each in together for group in each]]
    return [tuple(group.name for group in each) for each in found]


def by_classes(groups: Sequence[Group], classes: Classes) -> list[tuple[Group, ...]]:
    """The groups of each class; a group that no class names is alone."""
    known = {group.name: group for group in groups}
    named = {name for names in classes for name in names}
    together = [tuple(known[name] for name in names if name in known) for names in classes]
    alone = [(group,) for group in groups if group.name not in named]
    return [each for each in together if each] + alone


def _kind(group: Group) -> tuple[object, ...]:
    return group.kind, group.keeps_one, group.dense_units


def _is_moved(groups: Sequence[Group], moved: Places) -> bool:
    return any((axis.tensor, axis.dim) in moved for group in groups for axis in group.axes)


def _covers(classes: Sequence[Sequence[Group]], moved: Places) -> bool:
    """Whether all dimensions that move belong to these groups."""
    groups = [group for each in classes for group in each]
    return moved <= {(axis.tensor, axis.dim) for group in groups for axis in group.axes}


def _moved_together(model: nn.Module) -> Iterator[Places]:
    """The dimensions whose size each number of a configuration changes."""
    for path, _, config in configurations_in(model):
        module, prefix = model.get_submodule(path), f"{path}." if path else ""
        dense = shapes_of(module)
        if built_shapes(module, config, {}) == dense:
            for name, value in values_in(config).items():
                if type(value) is int and value > 1:
                    trials = (value // 2, value - 1, 2 * value)
                    shapes = (built_shapes(module, config, {name: n}) for n in trials)
                    moved = next((m for s in shapes if (m := moved_places(dense, s))), set())
                    yield {(f"{prefix}{tensor}", dim) for tensor, dim in moved}
            if not path:
                return
