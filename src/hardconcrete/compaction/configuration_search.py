"""Which numbers of a configuration describe a small model: guesses, answered by the constructor.

A number may describe a size if it equals one that was cut, or is a multiple of the units of a
group. It does if every dimension that its change moves gets the size of the small model.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from operator import attrgetter
from typing import Any

from torch import nn

from hardconcrete.compaction.configuration import Configuration
from hardconcrete.compaction.plan import CompactionPlan, KeptUnits
from hardconcrete.compaction.size_attributes import is_of_torch
from hardconcrete.compaction.unit_counts import counts_of_layers, multiple_counts, unit_counts
from hardconcrete.graph.propagate import named_tensors
from hardconcrete.units.configuration import (
    HEAD_SIZE,
    Numbers,
    Shapes,
    build,
    built_shapes,
    configurations_in,
    moved_places,
    shapes_of,
    values_in,
)
from hardconcrete.units.uniform import place

MAX_CHANGES_IN_PAIRS = 12
"""Up to so many changes are tried two at a time."""


def plans_with_numbers(
    plan: CompactionPlan, plain: nn.Module
) -> tuple[Iterator[CompactionPlan], CompactionPlan]:
    """The plan with numbers for configurations, the best first; and the one to guess from."""
    found = dict(_configurations(plan, plain))
    complete = {path: search for path, search in found.items() if search.is_complete}
    partial = {path: search for path, search in found.items() if not search.is_complete}
    plans = list[CompactionPlan]()
    if complete:
        attributes = dict(plan.attributes)
        for path, search in complete.items():
            attributes |= search.attributes(path.rpartition(".")[0])
        plans = [_with(plan, complete, attributes=attributes), _with(plan, complete)]
    bare, counted = _with(plan, partial), _with(plan, partial)
    for path, search in partial.items():
        cut = moved_places(search.dense, search.wanted)
        groups = _groups_in(plan, path)
        counted = _counted(counted, path, *unit_counts(search.module, search.config, groups, cut))
    plans += [counted] if counted == bare else [counted, bare]
    return chain(plans, _with_copies(counted, partial)), counted


def _with(plan: CompactionPlan, found: "Mapping[str, _Search]", **changes: Any) -> CompactionPlan:
    """The plan with the numbers that were found for each configuration."""
    configurations = {
        path: Configuration(search.numbers, search.not_described) for path, search in found.items()
    }
    return replace(plan, configurations=configurations, **changes)


def _groups_in(plan: CompactionPlan, path: str) -> dict[str, KeptUnits]:
    """The groups of a configuration's module, by their names inside it."""
    prefix = path[: path.rfind(".") + 1]
    return {
        name.removeprefix(prefix): group
        for name, group in plan.groups.items()
        if name.startswith(prefix)
    }


def _counted(
    plan: CompactionPlan, path: str, numbers: Numbers, attributes: Numbers
) -> CompactionPlan:
    """The plan with more numbers for a configuration and for the modules that it builds."""
    prefix, known = path[: path.rfind(".") + 1], plan.configurations[path]
    inside = {f"{prefix}{name}": number for name, number in attributes.items()}
    configuration = replace(known, numbers={**numbers, **known.numbers})
    return replace(
        plan,
        configurations={**plan.configurations, path: configuration},
        attributes={**plan.attributes, **inside},
    )


def _with_copies(plan: CompactionPlan, found: "Mapping[str, _Search]") -> Iterator[CompactionPlan]:
    """With each number that may count several copies of a unit, or that layers may read."""
    for path, search in found.items():
        part = search.module, search.config, _groups_in(plan, path)
        for numbers, attributes in multiple_counts(*part):
            yield _counted(plan, path, numbers, attributes)
        for attributes in counts_of_layers(*part):
            yield _counted(plan, path, {}, attributes)


def _configurations(plan: CompactionPlan, plain: nn.Module) -> "Iterator[tuple[str, _Search]]":
    """What was found for each configuration whose class builds the dense module from it."""
    done: list[str] = []
    if not plan.cuts:
        return
    for path, attribute, config in configurations_in(plain):
        if any(f"{path}.".startswith(each) for each in done):
            continue
        prefix = f"{path}." if path else ""
        search = _Search(plain.get_submodule(path), config, _cut_shapes(plan, plain, prefix), plan)
        if search.describes_dense:
            done.append(prefix)
            search.run()
            yield f"{prefix}{attribute}", search


def _cut_shapes(plan: CompactionPlan, plain: nn.Module, prefix: str) -> Shapes:
    """The shapes of the tensors in a module after the cuts of a plan."""
    tensors = named_tensors(plain)
    shapes = {id(tensor): list(tensor.shape) for tensor in tensors.values()}
    for cut in plan.cuts:
        shapes[id(tensors[cut.tensor])][cut.dim] = len(cut.kept)
    return {
        name.removeprefix(prefix): tuple(shapes[id(tensor)])
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


Change = tuple[str, int]
"""A name of a number and its new value."""


@dataclass
class _Search:
    """The search for the numbers of one configuration.

    Attributes:
        module: the dense module.
        config: its configuration.
        wanted: the shapes of the small module.
        numbers: what was found.
        built: the shapes that the class built so far.
    """

    module: nn.Module
    config: Any
    wanted: Shapes
    plan: CompactionPlan
    numbers: Numbers = field(default_factory=dict)
    built: dict[frozenset[Change], Shapes | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dense = shapes_of(self.module)
        self.describes_dense = self.shapes({}) == self.dense

    def shapes(self, numbers: Mapping[str, int]) -> Shapes | None:
        """The shapes that the class builds with these numbers; None where it refuses them."""
        key = frozenset(numbers.items())
        if key not in self.built:
            self.built[key] = built_shapes(self.module, self.config, numbers)
        return self.built[key]

    def run(self) -> None:
        """Find numbers, with the size of a head explicit where it only then stays."""
        for fixed in ({}, *self._head_sizes()) if self.changes else ():
            numbers = self._accepted(fixed)
            is_complete = self.shapes(numbers) == self.wanted
            if is_complete or not fixed:
                self.numbers = numbers
            if is_complete:
                return

    @property
    def is_complete(self) -> bool:
        """Whether the class builds the small module from these numbers."""
        return self.shapes(self.numbers) == self.wanted

    @property
    def not_described(self) -> tuple[str, ...]:
        """The tensors to which these numbers give another shape."""
        built = self.shapes(self.numbers) or {}
        return tuple(name for name, shape in self.wanted.items() if built.get(name) != shape)

    def attributes(self, path: str) -> Numbers:
        """The integers that modules of the small model have when their class builds them."""
        found = {}
        known = dict(self.module.named_modules())
        for name, module in build(self.module, self.config, self.numbers).named_modules():
            before = {} if is_of_torch(module) or name not in known else vars(known[name])
            for attribute, value in vars(module).items():
                old = before.get(attribute)
                if type(value) is type(old) is int and value != old:
                    found[".".join(filter(None, (path, name, attribute)))] = value
        return found

    def _head_sizes(self) -> Iterator[Numbers]:
        """The size of a head as it is, where the class reads one that is set."""
        values = values_in(self.config)
        for outer in sorted({name.rpartition(".")[0] for name in values}):
            name = f"{outer}.{HEAD_SIZE}" if outer else HEAD_SIZE
            if values.get(name) is None and self._can_be_set(name) and self._is_read(name):
                numbers = {v for v in values.values() if type(v) is int and v > 1}
                sizes = {a // b for a in numbers for b in numbers if a % b == 0} - {1}
                yield from (
                    {name: n} for n in sorted(sizes) if self.shapes({name: n}) == self.dense
                )

    def _can_be_set(self, name: str) -> bool:
        """Whether a class computes no such number itself."""
        outer, _, last = name.rpartition(".")
        config = attrgetter(outer)(self.config) if outer else self.config
        return not isinstance(inspect.getattr_static(type(config), last, None), property)

    def _is_read(self, name: str) -> bool:
        """Whether the shapes depend on a number that is unset: they do not for two values."""
        return any(self.shapes({name: number}) != self.dense for number in (2, 3))

    def _accepted(self, fixed: Numbers) -> Numbers:
        """Changes that move dimensions only to the sizes of the small model, one or two at once."""
        accepted = dict(fixed)
        changes = self.changes
        others = [change for change in changes if self._moves_elsewhere(accepted, change)]
        if len(others) <= MAX_CHANGES_IN_PAIRS:
            for pair in combinations(others, 2):
                self._moves_elsewhere(accepted, *pair)
        return accepted

    def _moves_elsewhere(self, accepted: Numbers, *changes: Change) -> bool:
        """Accept changes that move dimensions to the wanted sizes; return whether others move."""
        before = self.shapes(accepted)
        new = {name: number for name, number in changes if name not in accepted}
        if before is None or before == self.wanted or len(new) < len(changes):
            return False
        after = self.shapes(accepted | new)
        if after is None or after == before:
            return after is None
        if not self._lands(before, after):
            return True
        accepted |= new
        return False

    def _lands(self, before: Shapes, after: Shapes) -> bool:
        """Whether all dimensions that moved have the sizes of the small model."""
        if before.keys() != after.keys():
            return False
        return all(
            len(after[name]) == len(shape) == len(self.wanted[name])
            and all(
                new in (old, wanted)
                for old, new, wanted in zip(shape, after[name], self.wanted[name], strict=True)
            )
            for name, shape in before.items()
        )

    @cached_property
    def changes(self) -> list[Change]:
        """What may become of numbers: by units, by sizes, by multiples of units, where unset."""
        units, sizes = self._unit_counts(), self._cut_sizes()
        multiples = {(n * k, kept * k) for n, kept in units for k in range(2, 2 + max(n, 64))}
        values = values_in(self.config).items()
        numbers = [(name, value) for name, value in values if type(value) is int]
        found = [
            (name, new)
            for changes in (sorted(units), sorted(sizes), sorted(multiples))
            for name, value in numbers
            for old, new in changes
            if value == old
        ]
        unset = [name for name, value in values if value is None and sizes and self._is_read(name)]
        return list(dict.fromkeys(found)) + [(name, new) for _, new in sizes for name in unset]

    def _unit_counts(self) -> set[tuple[int, int]]:
        """Numbers of units before and after, where the groups of all layers agree."""
        groups = self.plan.groups.items()
        return _agreed((place(name), len(g.kept), g.units) for name, g in groups)

    def _cut_sizes(self) -> set[tuple[int, int]]:
        """Sizes before and after, where the tensors of all layers agree."""
        return _agreed(
            ((place(name), dim), new, old)
            for name, shape in self.dense.items()
            for dim, (old, new) in enumerate(zip(shape, self.wanted[name], strict=True))
        )


def _agreed(changes: Any) -> set[tuple[int, int]]:
    """The changes of sizes, from old to new, that are the same in all layers."""
    found: dict[Any, set[int]] = {}
    for where, new, old in changes:
        found.setdefault((where, old), set()).add(new)
    return {(old, *news) for (_, old), news in found.items() if len(news) == 1 and news != {old}}
