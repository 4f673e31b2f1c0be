"""Select the units to keep: those with the smallest importance per cost are closed first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.units import Group
from hardconcrete.units.uniform import Classes, by_classes

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
    classes: Classes = (),
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
        classes: names of groups that keep equally many units; see ``uniform_classes``.
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
    together = by_classes(groups, classes)
    mask = _Mask(score, together, is_open.detach().double().cpu().clone(), round_to)
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
        classes: groups that keep equally many units; most have one group.
        closed_at: the ratio of importance to saving at which a unit was closed in this selection;
            -1 for a unit that was closed before.
    """

    score: Tensor
    classes: Sequence[tuple[Group, ...]]
    is_open: Tensor
    round_to: int
    closed_at: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.closed_at = torch.full_like(self.score, -1.0)

    def block_size(self, group: Group) -> int:
        """Units of a block in each group; 1 for single weights, which do not change a size."""
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

        Compaction keeps a unit of a group without open ones, so this opens a block there. All
        groups of a class get the largest width among them.
        """
        for groups in self.classes:
            size = self.block_size(groups[0])
            widths = [len(self.opened(group)) for group in groups]
            least = max(*widths, int(groups[0].keeps_one and size > 1))
            for group, width in zip(groups, widths, strict=True):
                lacking = -(-least // size) * size - width
                self.is_open[self.closed(group)[:lacking]] = 1.0

    def blocks(self, groups: Sequence[Group]) -> Iterator[Tensor]:
        """Blocks of closed units, in the order to open them; a shorter block comes last."""
        size = self.block_size(groups[0])
        yield from _joined([self.closed(group).split(size) for group in groups])

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
        """The blocks of all classes; each class keeps its most important one."""
        ratios = _ratio(mask.score, saving)
        blocks = list[Tensor]()
        for groups in mask.classes:
            split = [_split(mask.opened(g), ratios, mask.block_size(g)) for g in groups]
            together = _joined(split)
            blocks += together[: len(together) - groups[0].keeps_one]
        index, sizes = torch.cat([NO_UNITS, *blocks]), [len(each) for each in blocks]
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


def _split(index: Tensor, ratios: Tensor, size: int) -> list[Tensor]:
    """Blocks of open units, the smallest ratios first.

    The first block is the remainder that makes the width no multiple.
    """
    index, extra = index[ratios[index].argsort(stable=True)], len(index) % size
    sizes = [extra] * (extra > 0) + [size] * (len(index) // size)
    return list(index.split(sizes)) if sizes else []


def _joined(blocks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The first blocks of all groups as one block, the second ones, and so on."""
    return [torch.cat(parts) for parts in zip(*blocks, strict=False)]


def _open_what_fits(mask: _Mask, limits: _Limits) -> bool:
    """Open the closed blocks that fit, the last closed first; return whether any did."""
    waiting = [mask.blocks(groups) for groups in mask.classes]
    equal_cost = limits.settings.equal_cost_groups
    trials: dict[int, tuple[Tensor, tuple[float, float]]] = {}

    def queue(k: int, min_size: int, max_rank: tuple[float, float]) -> None:
        """Queue the next block of a class, unless it is shorter than one that did not fit."""
        units = next(waiting[k], NO_UNITS)
        closed_now = bool((mask.closed_at[units] >= 0).any())
        may_open = closed_now or (limits.settings.reopen and not mask.classes[k][0].of_weights)
        if len(units) and may_open and len(units) >= min_size:
            trials[k] = units, min(max_rank, mask.rank(units))

    for k in range(len(mask.classes)):
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
        groups = mask.classes[k]
        if not groups[0].of_weights and not equal_cost.issuperset(group.index for group in groups):
            queue(k, len(units), rank)
    return opened
