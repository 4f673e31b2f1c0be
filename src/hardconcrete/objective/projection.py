"""From a budget to a mask: which units stay so that a model costs what the budget allows.

A budget by importance removes the units it measured to matter least. Otherwise the units that are
least certain to be open go first. Units go and return in blocks of a width that you choose.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError, CompactionError, HardConcreteWarning
from hardconcrete.gating import GatedModel
from hardconcrete.gating.open_values import open_values
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.score import DEFAULT_EXAMPLES
from hardconcrete.importance.select import select_units
from hardconcrete.importance.stages import (
    PruningState,
    prune_in_stages,
    stages_for,
    warn_not_refitted,
)
from hardconcrete.objective.constraint import BAND, Constraint, cheapest_mask, delivered, expected
from hardconcrete.objective.cost_targets import CostTargets
from hardconcrete.units import Group
from hardconcrete.units.uniform import Classes, by_classes

RELATIVE_ROUNDING = 1e-12
"""Relative rounding of a sum in float64. A cost above its limit by less keeps the limit."""

COLLAPSED_BELOW = 0.8
"""A cost below this part of its limit, with a whole group closed, is a collapse."""


@dataclass(frozen=True)
class Widths:
    """Which numbers of units a group may keep; see ``project``."""

    round_to: int = 1
    classes: Classes = ()


@dataclass(frozen=True, eq=False)
class Projection:
    """A mask of a model's units that keeps a budget.

    Args:
        gated: the model; a re-fitted copy where weights had to change.
        values: the value of every gate, 0 where the unit is removed.
        min_units: how many units stay in a group that the mask closes.
    """

    gated: GatedModel
    values: Tensor
    min_units: int


@runtime_checkable
class MaskSource(Protocol):
    """Anything that gives a mask for a model, as every ``Budget`` does."""

    def project(
        self,
        gated: GatedModel | None = None,
        *,
        round_to: int = 1,
        uniform: bool = False,
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
    ) -> Projection:
        """The mask of a model that keeps the budget; see ``Budget.project``."""


@torch.inference_mode(False)  # the mask belongs to a model that can be trained
def project(
    gated: GatedModel,
    limits: Sequence[Constraint] = (),
    *,
    round_to: int = 1,
    classes: Classes = (),
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    importance: Tensor | None = None,
) -> Projection:
    """The mask of a model that keeps limits and fills blocks. The model does not change.

    Args:
        gated: the model with its gates.
        limits: the costs that the mask has to keep; without any, only widths change.
        round_to: widths are multiples of this, as far as a group has as many units.
        classes: names of groups that keep equally many units.
        batches: your batches, to choose units by importance and to re-fit the weights that stay.
        loss: calls the model on a batch and returns a scalar.
        importance: of every unit, as a budget measured it; it decides where there are no batches.

    Example:
        >>> import hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4))
        >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([5.0, 5.0, 5.0, -9.0, -9.0, -9.0]))
        >>> (project(gated, round_to=2).values > 0).tolist()
        [True, True, True, True, False, False]
    """
    min_units, widths = units_of_closed_groups(gated, round_to), Widths(round_to, classes)
    if batches is not None and loss is not None:
        state = PruningState(copy.deepcopy(gated), keep_batches(batches, DEFAULT_EXAMPLES), loss)
        targets = CostTargets(state.gated, limits, state.is_open)
        stages = stages_for(targets.log_reduction)
        prune_in_stages(state, targets, stages=stages, round_to=round_to, classes=classes)
        warn_not_refitted(state)
        return Projection(state.gated, state.gates, min_units)
    if importance is not None and importance.any():
        is_open = _most_important(gated, limits, importance, widths)
    else:
        is_open = _most_certain(gated, limits, widths)
    values = torch.where(is_open, open_values(gated), 0.0)
    return Projection(gated, values, min_units)


def _most_important(
    gated: GatedModel, limits: Sequence[Constraint], importance: Tensor, widths: Widths
) -> Tensor:
    """Which units stay by importance, as in training.

    Closed units count as unimportant, because their weights were not trained with the others.
    """
    was_open = gated.gates.is_open()
    costs, settings = CostTargets(gated, limits, was_open.double())(1.0)
    kept = select_units(
        importance.to(was_open.device) * was_open,
        gated.groups,
        was_open,
        costs,
        round_to=widths.round_to,
        classes=widths.classes,
        settings=settings,
    )
    return kept > 0


@torch.no_grad()
def _most_certain(gated: GatedModel, limits: Sequence[Constraint], widths: Widths) -> Tensor:
    """Which units stay by their gates: every group keeps its likeliest block.

    A group that is closed altogether, such as the inside of a residual branch, opens after all
    others. The layers that follow it, perhaps a batch norm, have adapted to its absence. One block
    of it stays in any case.
    """
    is_open, loose, every = gated.gates.is_open(), list[Block](), list[Block]()
    for groups in by_classes(gated.groups, widths.classes):
        blocks = _joined([_blocks(g, gated, is_open, widths.round_to) for g in groups])
        every += blocks
        stays = groups[0].keeps_one and any(is_open[g.slice].any() for g in groups)
        loose += blocks[1:] if stays else blocks
        for block in blocks:
            is_open[block.gates] = is_open[block.gates].any()
    fits = _Fits(gated, limits, widths)
    return _fitted(fits, is_open, loose, every) if limits else is_open


@dataclass(frozen=True, eq=False)
class Block:
    """Units of a group that are closed or open together.

    Args:
        gates: their indices in the bank.
        rank: the smallest goes first. Whether any unit of the group is open; the mean probability
            to be open; where it is equal, the mean ``GateBank.openness``; at last the order in the
            group.
        group: index of the group.
        alike: whether all full blocks of the group cost the same.
    """

    gates: Tensor
    rank: tuple[float, ...]
    group: int
    alike: bool


def _blocks(group: Group, gated: GatedModel, is_open: Tensor, size: int) -> list[Block]:
    """The units of a group, likeliest first. A group of single weights has no blocks."""
    if group.of_weights:
        return []
    openness = gated.gates.openness().double()
    chance = gated.gates.open_probability().double()
    order = openness[group.slice].argsort(descending=True, stable=True) + group.start
    alike = group.name in {traced.name for traced in gated.analysis or ()}
    blocks: list[Block] = []
    alive = is_open[group.slice].any().item()
    rank: tuple[float, ...] = alive, 1.0, math.inf, 0.0
    for k, gates in enumerate(order.split(size)):
        block = alive, chance[gates].mean().item(), openness[gates].mean().item(), -k
        rank = tuple(map(min, block, rank))  # in this order, whatever the rounding
        blocks.append(Block(gates, rank, group.index, alike))
    return blocks


def _joined(blocks: Sequence[list[Block]]) -> list[Block]:
    """The first blocks of all groups as one block, the second ones, and so on."""
    return [
        replace(
            parts[0],
            gates=torch.cat([part.gates for part in parts]),
            rank=tuple(map(min, zip(*(part.rank for part in parts), strict=True))),
            alike=all(part.alike for part in parts),
        )
        for parts in zip(*blocks, strict=False)
    ]


def units_of_closed_groups(gated: GatedModel, round_to: int) -> int:
    """How many units stay in a group that is closed altogether: a block.

    It is one unit where named sites gate a group at several places: no site alone can close it.
    """
    traced = {group.name for group in gated.analysis or ()}
    return round_to if all(group.name in traced for group in gated.groups) else 1


class _Fits:
    """Whether compaction keeps the limits if these gates are open."""

    def __init__(self, gated: GatedModel, limits: Sequence[Constraint], widths: Widths) -> None:
        self.gated, self.limits, self.widths = gated, limits, widths
        round_to = widths.round_to
        none = torch.zeros(gated.gates.count, dtype=torch.bool)
        counts_blocks = units_of_closed_groups(gated, round_to) > 1  # one unit counts anyway
        groups = gated.groups if counts_blocks else ()
        first = [(g.slice, _blocks(g, gated, none, round_to)[:1]) for g in groups]
        self.first = [(where, block.gates) for where, blocks in first for block in blocks]

    def cheapest(self, is_open: Tensor) -> list[Tensor]:
        """The cheapest unit of each group by each limit. There is none for blocks of units."""
        units = torch.zeros_like(is_open)
        for group in self.gated.groups:
            units[group.slice] = not group.of_weights
        if self.widths.round_to > 1:
            return []
        kinds = [() if limit.kind is None else (limit.kind,) for limit in self.limits]
        cheapest = [cheapest_mask(self.gated, *kind).bool() for kind in kinds]
        return [torch.where(units, one_each, is_open) for one_each in cheapest]

    def __call__(self, is_open: Tensor) -> bool:
        counted = is_open.double()
        for where, gates in self.first:
            if not is_open[where].any():
                counted[gates] = 1.0
        costs = delivered(self.gated, self.limits, counted).tolist()
        return all(
            cost <= limit.limit / limit.dense * (1 + RELATIVE_ROUNDING)
            for cost, limit in zip(costs, self.limits, strict=True)
        )


def _fitted(fits: _Fits, is_open: Tensor, loose: list[Block], every: list[Block]) -> Tensor:
    """Close the least certain blocks until the limits hold. Then open all that still fit."""
    loose = sorted(loose, key=lambda block: block.rank)
    everything = is_open.clone()
    for block in loose:
        everything[block.gates] = True
    if fits(everything):
        return everything
    opened = [block for block in loose if is_open[block.gates].any()]
    least, most = 0, len(opened)
    if not fits(_without(is_open, opened)):
        for one_each in fits.cheapest(is_open):  # not the likeliest, but it fits
            if fits(one_each):
                return _filled(fits, one_each, sorted(every, key=lambda block: block.rank))
        raise CompactionError(
            "the budget cannot be kept: one block of each group already exceeds it; raise "
            f"the budget{', or lower round_to' * (fits.widths.round_to > 1)}"
        )
    while least < most:
        middle = (least + most) // 2
        if fits(_without(is_open, opened[:middle])):
            most = middle
        else:
            least = middle + 1
    return _filled(fits, _without(is_open, opened[:least]), loose)


def _filled(fits: _Fits, is_open: Tensor, loose: list[Block]) -> Tensor:
    """Open all blocks that still fit."""
    while True:  # again: where layers select their inputs, more units can cost less
        more = _reopened(fits, is_open, loose)
        if torch.equal(more, is_open):
            return is_open
        is_open = more


def _reopened(fits: _Fits, is_open: Tensor, loose: list[Block]) -> Tensor:
    refused: dict[int, int] = {}
    for block in reversed(loose):
        size, most = len(block.gates), refused.get(block.group)
        if is_open[block.gates].any() or (most and (block.alike or size < most)):
            continue  # a shorter block, the last of its group, comes after all others
        trial = is_open.clone()
        trial[block.gates] = True
        if fits(trial):
            is_open = trial
        else:
            refused[block.group] = size
    return is_open


def _without(is_open: Tensor, blocks: Sequence[Block]) -> Tensor:
    rest = is_open.clone()
    for block in blocks:
        rest[block.gates] = False
    return rest


STACKLEVEL = 5
"""Stack level of the warnings below: the caller of ``compact``, over ``Budget.project``."""


def warn_of_distance(gated: GatedModel, limits: Sequence[Constraint], advice: str) -> None:
    """Warn where the mask removes units in use, or opens units that were not trained.

    Args:
        gated: the model as its training ended.
        limits: those of its budget.
        advice: what to do about a cost above its limit.
    """
    is_open = gated.gates.is_open().double()
    costs = delivered(gated, limits, is_open).tolist()
    parts = [cost * limit.dense / limit.limit for cost, limit in zip(costs, limits, strict=True)]
    for group in gated.groups:
        about = [k for k, limit in enumerate(limits) if group.start in _gates_of(limit, gated)]
        nearest = max(about, key=parts.__getitem__, default=None)
        closed = group.keeps_one and not is_open[group.slice].any()
        if closed and nearest is not None and parts[nearest] < COLLAPSED_BELOW:
            costs_now = _costs_in_words(gated, limits[nearest], costs[nearest])
            warnings.warn(
                f"the training ended far below its budget, {costs_now}, and closed {group.name} "
                "altogether: now units open that the network was not trained with. Train longer, "
                "with steps=... of the budget, or with a larger budget",
                HardConcreteWarning,
                STACKLEVEL,
            )
            break
    for limit, cost, part in zip(limits, costs, parts, strict=True):
        if part > 1 + BAND:
            warnings.warn(
                f"the training ended above its budget, {_costs_in_words(gated, limit, cost)}: "
                f"now units are closed that the network still uses. {advice}",
                HardConcreteWarning,
                STACKLEVEL,
            )


def _gates_of(limit: Constraint, gated: GatedModel) -> range:
    return range(*limit.gates(gated).indices(gated.gates.count))


def _costs_in_words(gated: GatedModel, limit: Constraint, cost: float) -> str:
    """The delivered and the expected cost, and the limit."""
    probability = gated.gates.open_probability().detach()
    mean = expected(gated, [limit], probability, exactly=True).item()
    return (
        f"with {cost:.1%} of the {limit.label} delivered and {mean:.1%} expected instead of "
        f"{limit.limit / limit.dense:.1%}"
    )


def refuse_another_model(trained: GatedModel, gated: GatedModel) -> None:
    """Refuse a model that is neither the one of a budget nor a copy of it."""
    sizes = [group.units for group in trained.groups]
    if not isinstance(gated, GatedModel) or [group.units for group in gated.groups] != sizes:
        raise ArgumentError(NOT_OF_THIS_MODEL)


NOT_OF_THIS_MODEL = "budget takes an hc.Budget of this model, or of a copy of it"
