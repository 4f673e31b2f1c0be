"""Which units to keep: the least important for what they cost go first, until every limit holds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.gating import Group

Costs = Callable[[Tensor], Tensor]
"""Each cost as a part of its limit, for open gates; differentiable, and met at 1."""

PART_PER_ROUND = 0.125
"""The part of the excess that goes before marginal costs are taken anew."""

LEAST_SAVING = 1e-12
"""A unit that saves a smaller part of a limit does not go for its sake."""

ROUNDING = 1e-12
"""Relative rounding of a sum in float64, which is no excess."""


def select_units(
    score: Tensor,
    groups: Sequence[Group],
    is_open: Tensor,
    costs: Costs,
    *,
    round_to: int = 1,
) -> Tensor:
    """Shut units until every cost is within its limit; what then still fits comes back.

    In every round the smallest ratios of importance to marginal cost go, by the limit that is
    exceeded most. A group keeps one block; a group of single weights may lose all.

    Args:
        score: importance of every unit; ``inf`` keeps one.
        groups: with the places of their gates.
        is_open: what is open now, 0 or 1, float64; what is shut stays shut.
        costs: of open gates.
        round_to: units of a group go in blocks, so that as many stay as fill multiples of this.
    """
    is_open, score = is_open.double().clone(), score.double()
    shut: list[tuple[float, Tensor]] = []  # with the ratio at which each went
    while True:
        excess, saving = _worst(costs, is_open)
        if excess <= ROUNDING:
            break
        ratio = torch.where(saving > LEAST_SAVING, score / saving.clamp(min=LEAST_SAVING), torch.inf)
        blocks = _blocks(ratio, score, saving, groups, is_open, round_to)
        if not blocks:
            raise CompactionError(
                "the limits cannot be met: with one block of each group they are exceeded by "
                f"{excess:.1%} still; raise the limit" + ", or lower round_to" * (round_to > 1)
            )
        gone, wanted = 0.0, max(PART_PER_ROUND * excess, 0.0)
        for price, saved, units in blocks:
            is_open[units] = 0.0
            shut.append((price, units))
            gone += saved
            if gone >= wanted:
                break
    return _refill(is_open, shut, groups, costs)


def _worst(costs: Costs, is_open: Tensor) -> tuple[float, Tensor]:
    """By how much the limit that is exceeded most is exceeded, and what each unit saves of it."""
    with torch.enable_grad():
        gates = is_open.clone().requires_grad_()
        found = costs(gates)
        worst = found.argmax()
        (slope,) = torch.autograd.grad(found[worst], gates, allow_unused=True)
    saving = torch.zeros_like(is_open) if slope is None else slope
    return found[worst].item() - 1, saving


def _blocks(
    ratio: Tensor,
    score: Tensor,
    saving: Tensor,
    groups: Sequence[Group],
    is_open: Tensor,
    size: int,
) -> list[tuple[float, float, Tensor]]:
    """Blocks of units that may go, cheapest first: ratio, what they save, and their places."""
    found = []
    for group in groups:
        places = is_open[group.slice].nonzero().flatten() + group.start
        places = places[ratio[places].argsort(stable=True)]
        extra = len(places) % size
        sizes = [extra] * (extra > 0) + [size] * (len(places) // size)
        sizes = sizes[: len(sizes) - group.keeps_one]
        if not sizes:
            continue
        places = places[: sum(sizes)]
        block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(places.device)
        zeros = score.new_zeros(len(sizes))
        saved = zeros.index_add(0, block, saving[places])
        weight = zeros.index_add(0, block, score[places])
        may_go = (zeros.index_add(0, block, ratio[places]) < torch.inf).tolist()
        rows = zip((weight / saved).tolist(), saved.tolist(), places.split(sizes), strict=True)
        found += [row for row, may in zip(rows, may_go, strict=True) if may]
    return sorted(found, key=lambda block: block[0])


@torch.no_grad()
def _refill(
    is_open: Tensor, shut: list[tuple[float, Tensor]], groups: Sequence[Group], costs: Costs
) -> Tensor:
    """Let blocks come back, the most important first; in a group, one that fits not ends it."""
    group_of = torch.cat(
        [torch.full((group.units,), k) for k, group in enumerate(groups)]
    ).tolist()
    refused: set[int] = set()
    for _, units in sorted(shut, key=lambda block: -block[0]):
        group = group_of[int(units[0])]
        if group in refused:
            continue
        is_open[units] = 1.0
        if (costs(is_open) > 1 + ROUNDING).any():
            is_open[units] = 0.0
            refused.add(group)
    return is_open
