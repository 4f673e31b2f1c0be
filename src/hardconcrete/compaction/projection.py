"""Gates that keep a budget exactly: units are shut or come back, by blocks of a given width.

Which ones, a budget by importance says by what it measured. Else the least certain are shut first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.gating import GatedModel
from hardconcrete.importance.select import select_units
from hardconcrete.objective import Budget, ImportanceBudget
from hardconcrete.objective.constraint import Constraint, cheapest_mask, delivered
from hardconcrete.objective.cost_targets import CostTargets
from hardconcrete.units import Group

ROUNDING = 1e-12
"""Relative rounding of a sum in float64, which is no excess."""


@dataclass(frozen=True, eq=False)
class Block:
    """Units of a group that are shut or open together.

    Args:
        gates: their places in the bank.
        rank: whether something of their group is open; their mean probability to be open; where it
            is the same, their mean log_alpha; and at last, the later one of a group goes first.
        group: number of the group.
        alike: whether all full blocks of the group cost the same.
    """

    gates: Tensor
    rank: tuple[float, ...]
    group: int
    alike: bool


def projected(gated: GatedModel, budget: Budget | None, round_to: int) -> Tensor:
    """Values of all gates, of which those that stay open fit the budget and fill blocks.

    Under a budget by importance the units go that matter least for what they cost, as in training.

    Otherwise every group keeps its likeliest block. A unit that comes back gets its mean, E[z], or
    the least number above zero where that is zero in floating point. A group that is shut
    altogether, such as the inside of a residual branch, comes back after all others: what follows
    it, a batch norm perhaps, has learnt to live with nothing. A block of it is counted, and stays,
    anyway.
    """
    if isinstance(budget, ImportanceBudget) and (score := budget.importance()).any():
        return _values(gated, _selected(gated, budget, score, round_to))
    with torch.no_grad():
        is_open, loose, every = gated.gates.readout() > 0, list[Block](), list[Block]()
        for group in gated.groups:
            blocks = _blocks(group, gated, is_open, round_to)
            every += blocks
            loose += blocks[1:] if is_open[group.slice].any() else blocks
            for block in blocks:
                is_open[block.gates] = is_open[block.gates].any()
        if budget is not None:
            fits = _Fits(gated, constraints_of(gated, budget), round_to)
            is_open = _fitted(fits, is_open, loose, every)
    return _values(gated, is_open)


@torch.no_grad()
def _values(gated: GatedModel, is_open: Tensor) -> Tensor:
    """The readout of the gates that stay open; the mean of those that come back."""
    values = gated.gates.readout()
    mean = gated.gates.distribution().mean.to(values.dtype)
    back = mean.clamp(min=torch.finfo(mean.dtype).tiny)
    return torch.where(is_open, torch.where(values > 0, values, back), 0.0)


def _selected(gated: GatedModel, budget: ImportanceBudget, score: Tensor, round_to: int) -> Tensor:
    """What stays open by importance; a unit that is shut does nothing, whatever it might gain."""
    limits, was_open = constraints_of(gated, budget), gated.gates.readout() > 0
    costs, settings = CostTargets(gated, limits, was_open.double())(1.0)
    kept = select_units(
        score.to(was_open.device) * was_open,
        gated.groups,
        was_open,
        costs,
        round_to=round_to,
        settings=settings,
    )
    return kept > 0


def constraints_of(gated: GatedModel, budget: Budget) -> Sequence[Constraint]:
    """The limits of a budget, which must be about such a model."""
    if not isinstance(budget, Budget) or [g.units for g in budget.gated.groups] != [
        g.units for g in gated.groups
    ]:
        raise ArgumentError("budget takes an hc.Budget of this model, or of a copy of it")
    return budget.constraints


def _blocks(group: Group, gated: GatedModel, is_open: Tensor, size: int) -> list[Block]:
    """The units of a group, likeliest first; single weights are none."""
    if not group.keeps_one:
        return []
    log_alpha = gated.gates.log_alpha.detach().double()
    chance = gated.gates.distribution().open_probability.double()
    order = log_alpha[group.slice].argsort(descending=True, stable=True) + group.start
    alike = group.name in {found.name for found in gated.analysis or ()}
    blocks: list[Block] = []
    alive = is_open[group.slice].any().item()
    rank: tuple[float, ...] = alive, 1.0, math.inf, 0.0
    for k, gates in enumerate(order.split(size)):
        own = alive, chance[gates].mean().item(), log_alpha[gates].mean().item(), -k
        rank = tuple(map(min, own, rank))  # in this order, whatever the rounding
        blocks.append(Block(gates, rank, group.index, alike))
    return blocks


def kept(gated: GatedModel, round_to: int) -> int:
    """How many units of a group that is shut altogether stay: a block.

    Where units have gates at several places a group can be shut by none of them alone: just one.
    """
    found = {group.name for group in gated.analysis or ()}
    return round_to if all(group.name in found for group in gated.groups) else 1


class _Fits:
    """Whether limits hold for what compaction leaves of open gates."""

    def __init__(self, gated: GatedModel, limits: Sequence[Constraint], round_to: int) -> None:
        self.gated, self.limits, self.round_to = gated, limits, round_to
        none = torch.zeros(len(gated.gates.log_alpha), dtype=torch.bool)
        groups = gated.groups if kept(gated, round_to) > 1 else ()  # one is counted anyway
        first = [(g.slice, _blocks(g, gated, none, round_to)[:1]) for g in groups]
        self.first = [(where, block.gates) for where, blocks in first for block in blocks]

    def cheapest(self, is_open: Tensor) -> list[Tensor]:
        """One unit of each group, the cheapest by each limit; not where blocks are asked for."""
        units = torch.zeros_like(is_open)
        for group in self.gated.groups:
            units[group.slice] = group.keeps_one
        if self.round_to > 1:
            return []
        kinds = [() if limit.kind is None else (limit.kind,) for limit in self.limits]
        found = [cheapest_mask(self.gated, *kind).bool() for kind in kinds]
        return [torch.where(units, one_each, is_open) for one_each in found]

    def __call__(self, is_open: Tensor) -> bool:
        counted = is_open.double()
        for where, gates in self.first:
            if not is_open[where].any():
                counted[gates] = 1.0
        costs = delivered(self.gated, self.limits, counted).tolist()
        return all(
            cost <= limit.limit / limit.dense * (1 + ROUNDING)
            for cost, limit in zip(costs, self.limits, strict=True)
        )


def _fitted(fits: _Fits, is_open: Tensor, loose: list[Block], every: list[Block]) -> Tensor:
    """Shut what is least certain until the limits hold; then let back in what still fits."""
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
            "the budget cannot be kept: with one block of each group it is exceeded still; raise "
            f"the budget{', or lower round_to' * (fits.round_to > 1)}"
        )
    while least < most:
        middle = (least + most) // 2
        if fits(_without(is_open, opened[:middle])):
            most = middle
        else:
            least = middle + 1
    return _filled(fits, _without(is_open, opened[:least]), loose)


def _filled(fits: _Fits, is_open: Tensor, loose: list[Block]) -> Tensor:
    """With all that still fits."""
    while True:  # again, for where layers select, more can cost less
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
