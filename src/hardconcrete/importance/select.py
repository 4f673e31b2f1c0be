"""Which units to keep: the least important for what they cost go first, until every limit holds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.units import Group

Costs = Callable[[Tensor], Tensor]
"""Each cost as a part of its limit, for open gates in float64; the limits are met at 1."""

EXCESS_PER_ROUND = 0.125
"""The part of the excess that goes before marginal costs are taken anew."""

LEAST_PER_ROUND = 0.01
"""The part of a limit that goes at least: marginal costs change little over so few units."""

LEAST_SAVING = 1e-12
"""A unit that saves a smaller part of a limit is not closed for its sake."""

ROUNDING = 1e-12
"""Relative rounding of a sum in float64, which is no excess."""


def select_units(
    score: Tensor,
    groups: Sequence[Group],
    is_open: Tensor,
    costs: Costs,
    *,
    round_to: int = 1,
    settings: "Selection | None" = None,
) -> Tensor:
    """Close units until every cost is within its limit; then open whatever still fits.

    In every round the smallest ratios of importance to marginal cost go, by the limit that is
    exceeded most. A group keeps one block of units; a group of single weights may lose all.

    Args:
        score: importance of every unit; ``inf`` keeps one. Of a closed unit, what it would gain.
        groups: with the places of their gates.
        is_open: what is open now, 0 or 1.
        costs: what compaction delivers.
        round_to: widths become multiples of this, as far as a group has as many units.
        settings: what else is known of the costs.

    Returns:
        What is open then, 0 or 1, in float64.

    Example:
        >>> group = Group("fc1", "neuron", units=4, axes=(), parameters=1, index=0)
        >>> score, is_open = torch.tensor([3.0, 1.0, 4.0, 2.0]), torch.ones(4)
        >>> select_units(score, [group], is_open, lambda z: z.sum(0, keepdim=True) / 2.5)
        tensor([1., 0., 1., 0.], dtype=torch.float64)
    """
    score = score.detach().double().cpu()
    if score.isnan().any():
        raise CompactionError("the importance of a unit is not a number: check the loss")
    settings = Selection() if settings is None else settings
    limits = _Limits(costs, settings, is_open.device)
    mask = _Mask(score, groups, is_open.detach().double().cpu().clone(), round_to)
    mask.round_up()
    _close(mask, limits)
    while _open_what_fits(mask, limits):  # again: where layers select inputs, more can cost less
        pass
    return mask.is_open.to(is_open.device)


@dataclass(frozen=True)
class Selection:
    """What else is known when units are selected.

    Args:
        smooth: near the costs and differentiable, with a slope wherever a unit costs something;
            the costs themselves where they have one.
        reopen: whether units that were closed before may open if they fit. Without it they only
            open to fill a block. Single weights never do: most of them cost nothing.
        last_resort: from a mask, others for the case that one block of each group, the most
            important one, costs too much: such as the cheapest unit of each group.
        alike: numbers of the groups whose units all cost the same: one trial tells whether another
            unit of such a group fits.
    """

    smooth: Costs | None = None
    reopen: bool = False
    last_resort: Callable[[Tensor], Iterable[Tensor]] = lambda _: ()
    alike: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Limits:
    """The costs of masks on the CPU, where many small steps are quicker."""

    costs: Costs
    settings: Selection
    device: torch.device

    def exact(self, is_open: Tensor) -> Tensor:
        return self.costs(is_open.to(self.device)).detach().double().cpu()

    def fit(self, is_open: Tensor) -> bool:
        return bool((self.exact(is_open) <= 1 + ROUNDING).all())

    def worst(self, is_open: Tensor) -> tuple[float, Tensor]:
        """By how much the limit that is exceeded most is exceeded, and what a unit saves of it."""
        exact = self.exact(is_open)
        worst = exact.argmax()
        excess = exact[worst].item() - 1
        if excess <= ROUNDING:
            return excess, is_open
        with torch.enable_grad():
            gates = is_open.to(self.device, copy=True).requires_grad_()
            smooth = (self.settings.smooth or self.costs)(gates)
            (slope,) = torch.autograd.grad(smooth[worst], gates, allow_unused=True)
        return excess, torch.zeros_like(is_open) if slope is None else slope.double().cpu()


NOTHING = torch.zeros(0, dtype=torch.int64)


@dataclass(eq=False)
class _Mask:
    """Open units, and in which order the others were closed.

    Attributes:
        price: the ratio at which a unit was closed now; -1 for one that was closed before.
    """

    score: Tensor
    groups: Sequence[Group]
    is_open: Tensor
    round_to: int
    price: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.price = torch.full_like(self.score, -1.0)

    def size(self, group: Group) -> int:
        """Units of a block; single weights leave a matrix as it is, and need none."""
        return self.round_to if group.keeps_one else 1

    def opened(self, group: Group) -> Tensor:
        """Places of the open units of a group."""
        return self.is_open[group.slice].nonzero().flatten() + group.start

    def closed(self, group: Group) -> Tensor:
        """Places of the others: the last one to be closed first, then by importance."""
        places = (self.is_open[group.slice] == 0).nonzero().flatten() + group.start
        places = places[self.score[places].argsort(descending=True, stable=True)]
        return places[self.price[places].argsort(descending=True, stable=True)]

    def round_up(self) -> None:
        """Open units until every width is a multiple, or the whole group is open.

        Of a group without an open unit compaction keeps one, and thus a block.
        """
        for group in self.groups:
            size, width = self.size(group), len(self.opened(group))
            lacking = -max(width, 1) % size + (not width) if size > 1 else 0
            self.is_open[self.closed(group)[:lacking]] = 1.0

    def blocks(self, group: Group) -> Iterator[Tensor]:
        """Closed units that can open together, in order; a short block is the last of its group."""
        places, size = self.closed(group), self.size(group)
        yield from (places[start : start + size] for start in range(0, len(places), size))

    def rank(self, units: Tensor) -> tuple[float, float]:
        """The larger one opens first."""
        return self.price[units].mean().item(), self.score[units].mean().item()


def _close(mask: _Mask, limits: _Limits) -> None:
    """Until the limits hold."""
    while (worst := limits.worst(mask.is_open))[0] > ROUNDING:
        excess, saving = worst
        blocks = _Blocks.of(mask, saving)
        if not len(blocks.ratio):
            _fall_back(mask, limits, excess)
            return
        wanted = max(EXCESS_PER_ROUND * excess, LEAST_PER_ROUND)
        gone = int((blocks.saved.cumsum(0) < min(wanted, excess)).sum()) + 1
        units = blocks.places[blocks.block < gone]
        mask.is_open[units] = 0.0
        mask.price[units] = blocks.ratio[blocks.block[blocks.block < gone]]


def _fall_back(mask: _Mask, limits: _Limits, excess: float) -> None:
    """Where nothing more can be closed."""
    if mask.round_to == 1:
        for is_open in limits.settings.last_resort(mask.is_open):
            if limits.fit(is_open):
                mask.is_open.copy_(is_open)
                return
    raise CompactionError(
        "the limits cannot be met: with one block of each group they are exceeded by "
        f"{excess:.1%} still; raise the limit" + ", or lower round_to" * (mask.round_to > 1)
    )


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Units that may be closed together, the cheapest blocks first.

    Args:
        places: of the units.
        block: the number of the block of each.
        ratio: importance for what is saved, by block.
        saved: by block, as a part of the limit.
    """

    places: Tensor
    block: Tensor
    ratio: Tensor
    saved: Tensor

    @classmethod
    def of(cls, mask: _Mask, saving: Tensor) -> "_Blocks":
        """Of all groups; each keeps one."""
        each = _ratio(mask.score, saving)
        parts, sizes = [NOTHING], list[int]()
        for group in mask.groups:
            places = mask.opened(group)
            places = places[each[places].argsort(stable=True)]
            own = _sizes(len(places), mask.size(group))
            own = own[: len(own) - group.keeps_one]
            parts.append(places[: sum(own)])
            sizes += own
        places = torch.cat(parts)
        block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        zeros = mask.score.new_zeros(len(sizes))
        saved = zeros.index_add(0, block, saving[places])
        ratio = _ratio(zeros.index_add(0, block, mask.score[places]), saved)
        order = ratio.argsort(stable=True)
        order = order[: int((ratio < torch.inf).sum())]
        rank = torch.full((len(sizes),), len(sizes)).index_copy(0, order, torch.arange(len(order)))
        return cls(places, rank[block], ratio[order], saved[order])


def _ratio(score: Tensor, saving: Tensor) -> Tensor:
    return torch.where(saving > LEAST_SAVING, score / saving.clamp(min=LEAST_SAVING), torch.inf)


def _sizes(units: int, size: int) -> list[int]:
    """Of the blocks: what makes the width no multiple goes first."""
    extra = units % size
    return [extra] * (extra > 0) + [size] * (units // size)


def _open_what_fits(mask: _Mask, limits: _Limits) -> bool:
    """Try closed blocks, what was closed last first; say whether any was opened."""
    waiting = [mask.blocks(group) for group in mask.groups]
    trials: dict[int, tuple[Tensor, tuple[float, float]]] = {}

    def put(k: int, before: int, highest: tuple[float, float]) -> None:
        """The next block of a group; a shorter one comes after all others."""
        units = next(waiting[k], NOTHING)
        now = len(units) and mask.price[units[0]] >= 0
        may_open = now or (limits.settings.reopen and mask.groups[k].keeps_one)
        if len(units) and may_open and len(units) >= before:
            trials[k] = units, min(highest, mask.rank(units))

    for k in range(len(mask.groups)):
        put(k, 0, (torch.inf, torch.inf))
    found = False
    while trials:
        k = max(trials, key=lambda k: trials[k][1])
        units, rank = trials.pop(k)
        mask.is_open[units] = 1.0
        if limits.fit(mask.is_open):
            found = True
            put(k, 0, rank)
            continue
        mask.is_open[units] = 0.0
        if k not in limits.settings.alike and mask.groups[k].keeps_one:
            put(k, len(units), rank)
    return found
