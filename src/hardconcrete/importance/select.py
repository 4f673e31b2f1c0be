"""Select the units to keep: those with the smallest importance per cost are closed first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.units import Group

Costs = Callable[[Tensor], Tensor]
"""Takes a mask of open units in float64; returns each cost as a fraction of its limit."""

EXCESS_FRACTION_PER_ROUND = 0.125
"""The fraction of the excess that is removed before marginal costs are computed again."""

MIN_LIMIT_FRACTION_PER_ROUND = 0.01
"""A round removes at least this fraction of a limit: marginal costs hardly change by it."""

MIN_SAVED_LIMIT_FRACTION = 1e-12
"""A unit that saves less than this fraction of a limit does not help to meet it."""

ROUNDING_ERROR = 1e-12
"""Relative rounding error of a sum in float64. A smaller excess does not count."""


def select_units(
    score: Tensor,
    groups: Sequence[Group],
    is_open: Tensor,
    costs: Costs,
    *,
    round_to: int = 1,
    settings: "SelectionSettings | None" = None,
) -> Tensor:
    """Close units until every cost is within its limit; then open units that still fit.

    Each round takes the limit that is exceeded most, and closes the units with the smallest ratio
    of importance to marginal cost. A group keeps one block of units. A group of single weights may
    lose all.

    Args:
        score: importance of every unit; ``inf`` keeps a unit.
        groups: the groups of the bank.
        is_open: the mask of units that are open now, 0 or 1.
        costs: the costs of the compacted model.
        round_to: widths become multiples of this, except in groups with fewer units.
        settings: what else is known about the costs.

    Returns:
        The new mask, 0 or 1, in float64.

    Example:
        >>> group = Group("fc1", "neuron", units=4, axes=(), parameters=1, index=0)
        >>> score, is_open = torch.tensor([3.0, 1.0, 4.0, 2.0]), torch.ones(4)
        >>> select_units(score, [group], is_open, lambda z: z.sum(0, keepdim=True) / 2.5)
        tensor([1., 0., 1., 0.], dtype=torch.float64)
    """
    score = score.detach().double().cpu()
    if score.isnan().any():
        raise CompactionError("the importance of a unit is not a number: check the loss")
    settings = SelectionSettings() if settings is None else settings
    limits = _Limits(costs, settings, is_open.device)
    mask = _Mask(score, groups, is_open.detach().double().cpu().clone(), round_to)
    mask.round_up()
    _close(mask, limits)
    while _open_what_fits(mask, limits):  # where layers select inputs, more units can cost less
        pass
    return mask.is_open.to(is_open.device)


@dataclass(frozen=True)
class SelectionSettings:
    """What ``select_units`` may use besides the costs.

    Args:
        smooth_costs: a differentiable approximation of the costs, with a gradient for every unit
            that costs something. None differentiates the costs themselves.
        reopen: whether units that were closed before may open if they fit. Without it they only
            open to fill a block. Single weights never reopen: most of them cost nothing.
        fallback_masks: takes a mask and returns others to try if one block of each group, the most
            important one, costs too much. One example is the cheapest unit of each group.
        equal_cost_groups: numbers of the groups whose units all cost the same. There one trial
            says whether another unit fits.
    """

    smooth_costs: Costs | None = None
    reopen: bool = False
    fallback_masks: Callable[[Tensor], Iterable[Tensor]] = lambda _: ()
    equal_cost_groups: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Limits:
    """The costs of masks, and whether they are within their limits.

    Masks are on the CPU, where many small steps are faster; costs are computed on ``device``.
    """

    costs: Costs
    settings: SelectionSettings
    device: torch.device

    def exact(self, is_open: Tensor) -> Tensor:
        return self.costs(is_open.to(self.device)).detach().double().cpu()

    def fit(self, is_open: Tensor) -> bool:
        return bool((self.exact(is_open) <= 1 + ROUNDING_ERROR).all())

    def worst(self, is_open: Tensor) -> tuple[float, Tensor]:
        """The largest excess over a limit, and the fraction of that limit that each unit saves."""
        exact = self.exact(is_open)
        worst = exact.argmax()
        excess = exact[worst].item() - 1
        if excess <= ROUNDING_ERROR:
            return excess, is_open
        with torch.enable_grad():
            gates = is_open.to(self.device, copy=True).requires_grad_()
            smooth = (self.settings.smooth_costs or self.costs)(gates)
            (gradient,) = torch.autograd.grad(smooth[worst], gates, allow_unused=True)
        return excess, torch.zeros_like(is_open) if gradient is None else gradient.double().cpu()


NO_UNITS = torch.zeros(0, dtype=torch.int64)


@dataclass(eq=False)
class _Mask:
    """The open units, and the order in which the others were closed.

    Attributes:
        closed_at: the ratio of importance to saving at which a unit was closed in this selection;
            -1 for a unit that was closed before.
    """

    score: Tensor
    groups: Sequence[Group]
    is_open: Tensor
    round_to: int
    closed_at: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.closed_at = torch.full_like(self.score, -1.0)

    def block_size(self, group: Group) -> int:
        """Units of a block; 1 for single weights."""
        return 1 if group.of_weights else self.round_to

    def opened(self, group: Group) -> Tensor:
        """Indices of the open units of a group."""
        return self.is_open[group.slice].nonzero().flatten() + group.start

    def closed(self, group: Group) -> Tensor:
        """Indices of the closed units: the last one closed comes first, then the most important."""
        index = (self.is_open[group.slice] == 0).nonzero().flatten() + group.start
        index = index[self.score[index].argsort(descending=True, stable=True)]
        return index[self.closed_at[index].argsort(descending=True, stable=True)]

    def round_up(self) -> None:
        """Open units until every width is a multiple, or the whole group is open.

        Compaction keeps a unit of a group without open ones, so this opens a block there.
        """
        for group in self.groups:
            size, width = self.block_size(group), len(self.opened(group))
            least = max(width, int(group.keeps_one))
            lacking = -least % size + (least - width) if size > 1 else 0
            self.is_open[self.closed(group)[:lacking]] = 1.0

    def blocks(self, group: Group) -> Iterator[Tensor]:
        """Blocks of closed units, in the order to open them; a shorter block comes last."""
        index, size = self.closed(group), self.block_size(group)
        yield from (index[start : start + size] for start in range(0, len(index), size))

    def rank(self, units: Tensor) -> tuple[float, float]:
        """The block with the larger rank opens first."""
        return self.closed_at[units].mean().item(), self.score[units].mean().item()


def _close(mask: _Mask, limits: _Limits) -> None:
    """Close units until the limits hold."""
    while (worst := limits.worst(mask.is_open))[0] > ROUNDING_ERROR:
        excess, saving = worst
        blocks = _Blocks.from_mask(mask, saving)
        if not len(blocks.ratio):
            _fall_back(mask, limits, excess)
            return
        target = max(EXCESS_FRACTION_PER_ROUND * excess, MIN_LIMIT_FRACTION_PER_ROUND)
        count = int((blocks.saved.cumsum(0) < min(target, excess)).sum()) + 1
        units = blocks.index[blocks.block < count]
        mask.is_open[units] = 0.0
        mask.closed_at[units] = blocks.ratio[blocks.block[blocks.block < count]]


def _fall_back(mask: _Mask, limits: _Limits, excess: float) -> None:
    """Use the first fallback mask that fits, when no more units can be closed."""
    if mask.round_to == 1:
        for is_open in limits.settings.fallback_masks(mask.is_open):
            if limits.fit(is_open):
                mask.is_open.copy_(is_open)
                return
    raise CompactionError(
        "the limits cannot be met: with one block of each group they are still exceeded by "
        f"{excess:.1%}; raise the limit" + ", or lower round_to" * (mask.round_to > 1)
    )


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Blocks of units that may be closed together, those with the smallest ratio first.

    Args:
        index: of the units.
        block: for each unit, the number of its block.
        ratio: for each block, importance over saving.
        saved: for each block, the fraction of the limit that it saves.
    """

    index: Tensor
    block: Tensor
    ratio: Tensor
    saved: Tensor

    @classmethod
    def from_mask(cls, mask: _Mask, saving: Tensor) -> "_Blocks":
        """The blocks of all groups; each group keeps its most important one."""
        ratios = _ratio(mask.score, saving)
        parts, sizes = [NO_UNITS], list[int]()
        for group in mask.groups:
            index = mask.opened(group)
            index = index[ratios[index].argsort(stable=True)]
            group_sizes = _block_sizes(len(index), mask.block_size(group))
            group_sizes = group_sizes[: len(group_sizes) - group.keeps_one]
            parts.append(index[: sum(group_sizes)])
            sizes += group_sizes
        index = torch.cat(parts)
        block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        zeros = mask.score.new_zeros(len(sizes))
        saved = zeros.index_add(0, block, saving[index])
        ratio = _ratio(zeros.index_add(0, block, mask.score[index]), saved)
        order = ratio.argsort(stable=True)
        order = order[: int((ratio < torch.inf).sum())]
        rank = torch.full((len(sizes),), len(sizes)).index_copy(0, order, torch.arange(len(order)))
        return cls(index, rank[block], ratio[order], saved[order])


def _ratio(score: Tensor, saving: Tensor) -> Tensor:
    return torch.where(
        saving > MIN_SAVED_LIMIT_FRACTION,
        score / saving.clamp(min=MIN_SAVED_LIMIT_FRACTION),
        torch.inf,
    )


def _block_sizes(units: int, size: int) -> list[int]:
    """The sizes of the blocks: first the remainder that makes the width no multiple."""
    extra = units % size
    return [extra] * (extra > 0) + [size] * (units // size)


def _open_what_fits(mask: _Mask, limits: _Limits) -> bool:
    """Open the closed blocks that fit, the last closed first; return whether any did."""
    waiting = [mask.blocks(group) for group in mask.groups]
    trials: dict[int, tuple[Tensor, tuple[float, float]]] = {}

    def queue(k: int, min_size: int, max_rank: tuple[float, float]) -> None:
        """Queue the next block of a group, unless it is shorter than one that did not fit."""
        units = next(waiting[k], NO_UNITS)
        closed_now = len(units) and mask.closed_at[units[0]] >= 0
        may_open = closed_now or (limits.settings.reopen and not mask.groups[k].of_weights)
        if len(units) and may_open and len(units) >= min_size:
            trials[k] = units, min(max_rank, mask.rank(units))

    for k in range(len(mask.groups)):
        queue(k, 0, (torch.inf, torch.inf))
    opened = False
    while trials:
        k = max(trials, key=lambda k: trials[k][1])
        units, rank = trials.pop(k)
        mask.is_open[units] = 1.0
        if limits.fit(mask.is_open):
            opened = True
            queue(k, 0, rank)
            continue
        mask.is_open[units] = 0.0
        if k not in limits.settings.equal_cost_groups and not mask.groups[k].of_weights:
            queue(k, len(units), rank)
    return opened
