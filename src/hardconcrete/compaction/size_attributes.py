"""Integers that modules keep, such as ``self.channels`` or ``self.num_heads``: guesses to verify.

Nothing says that an integer is a size. It may be one where it equals a size that was cut or the
number of units of a group. A guess counts only if the model that it gives computes the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

from hardconcrete.compaction.architecture import size_attributes
from hardconcrete.compaction.module_form import is_transposed_linear
from hardconcrete.compaction.plan import CompactionPlan

Attributes = dict[str, int]
"""The new value of each attribute, by the path of its module and its name."""

Answers = Mapping[int, int]
"""What a number becomes, where there is one answer."""

MAX_ATTRIBUTES_IN_TURN = 12
"""Up to so many attributes are tried in turn; of more, only all of them at once."""


def size_guesses(plan: CompactionPlan, model: nn.Module) -> Iterator[Attributes]:
    """What the integers of your modules may become, the likeliest guess first, each guess once.

    There are at most 6 guesses for each attribute and 2 more.
    """
    tried: list[Attributes] = []
    for guess in _guesses(plan, model):
        if guess not in tried:
            tried.append(guess)
            yield guess


def _guesses(plan: CompactionPlan, model: nn.Module) -> Iterator[Attributes]:
    """By sizes that were cut inside the module; then also by numbers of units."""
    sizes = _new_values(model, lambda prefix: [_cut_sizes(plan, prefix)])
    in_turn = len(sizes) <= MAX_ATTRIBUTES_IN_TURN
    if sizes:
        yield sizes
    if in_turn and len(sizes) > 1:
        yield from ({name: new} for name, new in sizes.items())
        yield from _all_but_one(sizes)
    units = _new_values(model, lambda prefix: _unit_counts(plan, prefix))
    units = {name: new for name, new in units.items() if sizes.get(name) != new}
    both = sizes | units
    in_turn = len(both) <= MAX_ATTRIBUTES_IN_TURN
    by_attribute = _by_attribute(units)
    if len(by_attribute) <= MAX_ATTRIBUTES_IN_TURN:  # the fewest first: others may go unnoticed
        yield from (sizes | alike for alike in by_attribute)
    pairs = [alike | count for alike in _by_attribute(sizes) for count in by_attribute]
    if len(pairs) <= MAX_ATTRIBUTES_IN_TURN:  # not every number that equals a size is that size
        yield from _by_attribute(sizes)
        yield from pairs
    if in_turn:
        yield from (sizes | {name: new} for name, new in units.items())
    if units:
        yield both
    if units and in_turn and len(both) > 1:
        yield from _all_but_one(both)
        yield from ({name: new} for name, new in units.items())


def _all_but_one(attributes: Attributes) -> Iterator[Attributes]:
    for name in attributes:
        yield {other: new for other, new in attributes.items() if other != name}


def _by_attribute(attributes: Attributes) -> list[Attributes]:
    """The attributes of one name in all modules together, such as every ``num_heads``."""
    found: dict[str, Attributes] = {}
    for name, new in attributes.items():
        found.setdefault(name.rpartition(".")[2], {})[name] = new
    return list(found.values())


def _new_values(model: nn.Module, answers_in: Callable[[str], Iterable[Answers]]) -> Attributes:
    """The integers of modules outside torch.nn that have an answer; the first answer counts."""
    found: Attributes = {}
    for path, module in model.named_modules():
        if is_of_torch(module):
            continue
        integers = size_attributes(module)
        for answers in answers_in(f"{path}." if path else "") if integers else ():
            for name, value in integers.items():
                if value in answers:
                    found.setdefault(f"{path}.{name}", answers[value])
    return found


def is_of_torch(module: nn.Module) -> bool:
    """Whether a module is a layer whose sizes an adapter sets."""
    return type(module).__module__.startswith("torch.nn") or is_transposed_linear(module)


def _cut_sizes(plan: CompactionPlan, prefix: str) -> Answers:
    """Sizes that were cut inside a module."""
    cuts = [cut for cut in plan.cuts if cut.tensor.startswith(prefix)]
    return _unambiguous((cut.size, len(cut.kept)) for cut in cuts)


def _unit_counts(plan: CompactionPlan, prefix: str) -> Iterator[Answers]:
    """Numbers of units: made inside a module, cut inside it, and of the whole model.

    A tensor of a group has as many indices for one unit before a cut as after it.
    """
    groups = {
        name: (group.units, len(group.kept))
        for name, group in plan.groups.items()
        if len(group.kept) != group.units
    }
    sizes = {(cut.size, len(cut.kept)) for cut in plan.cuts if cut.tensor.startswith(prefix)}
    yield _unambiguous(counts for name, counts in groups.items() if f"{name}.".startswith(prefix))
    yield _unambiguous(
        (units, kept)
        for units, kept in groups.values()
        if any(size % units == 0 and size // units * kept == new for size, new in sizes)
    )
    yield _unambiguous(groups.values())


def _unambiguous(changes: Iterable[tuple[int, int]]) -> Answers:
    """Changes of numbers that all agree on what a number becomes."""
    found: dict[int, set[int]] = {}
    for before, after in changes:
        found.setdefault(before, set()).add(after)
    return {before: after.pop() for before, after in found.items() if len(after) == 1}
