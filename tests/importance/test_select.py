"""The choice of units against all possible choices, on problems that are small enough for that."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.importance.select import SelectionSettings, select_units
from hardconcrete.units import Axis, Group
from hardconcrete.units.group import in_order

Costs = Callable[[Tensor], Tensor]


def groups_of(*units: int, single_weights: bool = False) -> tuple[Group, ...]:
    dim = None if single_weights else 1
    axes = [(Axis("weight", dim, torch.arange(count)),) for count in units]
    return in_order(
        [Group(f"g{k}", "neuron", n, axes[k], parameters=1) for k, n in enumerate(units)]
    )


def chain(groups: Sequence[Group], ends: tuple[int, int], limits: Sequence[float]) -> Costs:
    """Weights of layers one after the other, and the units of all: as parts of their limits."""

    def costs(z: Tensor) -> Tensor:
        widths = [z.new_tensor(float(ends[0])), *(z[g.slice].sum() for g in groups)]
        widths.append(z.new_tensor(float(ends[1])))
        weights = sum(a * b for a, b in pairwise(widths))
        both = torch.stack([weights / limits[0], sum(widths[1:-1]) / limits[-1]])
        return both[: len(limits)]

    return costs


def masks(groups: Sequence[Group]) -> list[Tensor]:
    """All of them, with one open unit in each group."""
    units = sum(group.units for group in groups)
    every = (torch.tensor(bits, dtype=torch.float64) for bits in product((0, 1), repeat=units))
    return [mask for mask in every if all(mask[group.slice].any() for group in groups)]


def fits(costs: Costs, mask: Tensor) -> bool:
    return bool((costs(mask) <= 1 + 1e-9).all())


def test_near_the_best_of_all_choices() -> None:
    """Of the importance that any choice can keep, at least 85%, and 98% on average."""
    groups, parts = groups_of(4, 3, 3), []
    every = masks(groups)
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        score = torch.rand(10, generator=generator, dtype=torch.float64).exponential_(
            generator=generator
        )
        costs = chain(groups, (3, 2), [10 + 20 * torch.rand(1, generator=generator).item()])
        found = select_units(score, groups, torch.ones(10), costs)
        best = max(float(score @ mask) for mask in every if fits(costs, mask))
        parts.append(float(score @ found) / best)
        assert fits(costs, found)
        assert all(found[group.slice].any() for group in groups)
        for unit in (found == 0).nonzero().flatten():  # nothing is closed that would still fit
            more = found.clone()
            more[unit] = 1.0
            assert not fits(costs, more)
    assert min(parts) > 0.85
    assert sum(parts) / len(parts) > 0.98


def test_several_limits_hold_together() -> None:
    groups = groups_of(6, 6)
    score = torch.arange(12.0).add(1).square()
    for weights, units in ((60, 5), (20, 11), (35, 7)):
        costs = chain(groups, (4, 4), [weights, units])
        found = select_units(score, groups, torch.ones(12), costs)
        assert fits(costs, found)
        assert any(not fits(costs, found.index_fill(0, k, 1.0)) for k in (found == 0).nonzero())


def test_what_costs_nothing_of_a_limit_stays() -> None:
    groups = groups_of(4, 4)
    limit = 2.0

    def first_only(z: Tensor) -> Tensor:
        return z[:4].sum(0, keepdim=True) / limit

    score = torch.tensor([4.0, 3, 2, 1, 0, 0, 0, 0])
    found = select_units(score, groups, torch.ones(8), first_only)
    assert found.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("size", [2, 4])
def test_widths_are_multiples(size: int) -> None:
    groups = groups_of(11, 8, 3)
    for seed in range(10):
        score = torch.rand(22, generator=torch.Generator().manual_seed(seed))
        costs = chain(groups, (2, 2), [60.0])
        found = select_units(score, groups, torch.ones(22), costs, round_to=size)
        widths = [int(found[group.slice].sum()) for group in groups]
        assert fits(costs, found)
        assert all(w % size == 0 or w == g.units for w, g in zip(widths, groups, strict=True))


def test_partly_closed_groups_are_rounded_up_by_importance() -> None:
    groups = groups_of(6)
    score = torch.tensor([1.0, 5.0, 9.0, 2.0, 3.0, 4.0])
    is_open = torch.tensor([1.0, 0, 1, 0, 1, 0])
    found = select_units(score, groups, is_open, lambda z: z.new_zeros(1), round_to=4)
    assert found.tolist() == [1, 1, 1, 0, 1, 0]
    closed = select_units(score, groups, torch.zeros(6), lambda z: z.new_zeros(1), round_to=4)
    assert closed.tolist() == [0, 1, 1, 0, 1, 1]  # compaction keeps a block of it


def test_closed_units_come_back_only_where_they_may() -> None:
    groups = groups_of(4)
    score, is_open = torch.tensor([1.0, 5.0, 9.0, 2.0]), torch.tensor([1.0, 0, 0, 0])

    def costs(z: Tensor) -> Tensor:
        return z.sum(0, keepdim=True) / 3

    assert select_units(score, groups, is_open, costs).tolist() == [1, 0, 0, 0]
    again = SelectionSettings(reopen=True)
    assert select_units(score, groups, is_open, costs, settings=again).tolist() == [1, 1, 1, 0]


def test_a_cost_in_steps_is_followed_by_its_smooth_shape() -> None:
    """As latency is: nothing is saved before eight units are gone."""
    groups = groups_of(32, 32)

    def steps(z: Tensor) -> Tensor:
        widths = torch.stack([z[group.slice].sum() for group in groups])
        return (8 * (widths / 8).ceil()).sum(0, keepdim=True) / 40

    smooth = SelectionSettings(smooth_costs=lambda z: z.sum(0, keepdim=True) / 40)
    score = torch.rand(64, generator=torch.Generator().manual_seed(0))
    found = select_units(score, groups, torch.ones(64), steps, settings=smooth)
    widths = [int(found[group.slice].sum()) for group in groups]
    assert sum(widths) == 40  # what is within a step is free, and stays
    assert all(width % 8 == 0 for width in widths)
    with pytest.raises(CompactionError, match="cannot be met"):
        select_units(score, groups, torch.ones(64), steps)


def test_single_weights_may_all_go() -> None:
    groups = groups_of(4, single_weights=True)
    nearly_none = select_units(
        torch.rand(4), groups, torch.ones(4), lambda z: z.sum(0, keepdim=True) / 0.5, round_to=4
    )
    assert nearly_none.tolist() == [0, 0, 0, 0]


def test_infinite_importance_keeps_a_unit() -> None:
    score = torch.tensor([torch.inf, 1.0, 2.0, torch.inf])
    found = select_units(score, groups_of(4), torch.ones(4), lambda z: z.sum(0, keepdim=True) / 2)
    assert found.tolist() == [1, 0, 0, 1]
    with pytest.raises(CompactionError, match=r"limits cannot be met: .* still exceeded by 100.0%"):
        select_units(score, groups_of(4), torch.ones(4), lambda z: z.sum(0, keepdim=True))


def test_the_last_resort() -> None:
    """The most important unit of a group may be too dear."""
    price = torch.tensor([5.0, 1.0], dtype=torch.float64)

    def costs(z: Tensor) -> Tensor:
        return (z * price).sum(0, keepdim=True) / 2

    score, cheap = torch.tensor([9.0, 1.0]), torch.tensor([0.0, 1.0], dtype=torch.float64)
    everything = torch.ones(2, dtype=torch.float64)
    settings = SelectionSettings(fallback_masks=lambda _: [everything, cheap])
    found = select_units(score, groups_of(2), torch.ones(2), costs, settings=settings)
    assert found.tolist() == [0, 1]
    with pytest.raises(CompactionError, match=r"raise the limit$"):
        select_units(score, groups_of(2), torch.ones(2), costs)
    with pytest.raises(CompactionError, match="or lower round_to"):
        select_units(score, groups_of(2), torch.ones(2), costs, round_to=2)


def test_importance_that_is_no_number() -> None:
    score = torch.tensor([1.0, torch.nan])
    with pytest.raises(CompactionError, match="not a number: check the loss"):
        select_units(score, groups_of(2), torch.ones(2), lambda z: z.sum(0, keepdim=True))


def test_tens_of_thousands_of_units_need_few_looks_at_the_costs() -> None:
    """And twice the same choice."""
    groups = groups_of(*[3072, 64] * 12)
    units = sum(group.units for group in groups)
    score = torch.rand(units, generator=torch.Generator().manual_seed(0)).square()
    asked, chained = [], chain(groups, (64, 64), [12 * 3072 * 64 * 0.5])

    def costs(z: Tensor) -> Tensor:
        asked.append(1)
        return chained(z)

    alike = SelectionSettings(equal_cost_groups=frozenset(range(len(groups))), reopen=True)
    found = select_units(score, groups, torch.ones(units), costs, settings=alike)
    assert len(asked) < 200
    assert 0.999 < costs(found)[0] <= 1
    assert torch.equal(found, select_units(score, groups, torch.ones(units), costs, settings=alike))


@pytest.mark.parametrize("round_to", [1, 2])
def test_classes_keep_equally_many_units(round_to: int) -> None:
    """Of the importance that equal numbers of units can keep, at least 75%."""
    groups = groups_of(4, 4, 2)

    def is_uniform(mask: Tensor) -> bool:
        widths = [int(mask[group.slice].sum()) for group in groups]
        return widths[0] == widths[1] and all(width % round_to == 0 for width in widths)

    every = [mask for mask in masks(groups) if is_uniform(mask)]
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        score = torch.rand(10, generator=generator, dtype=torch.float64)
        is_open = (torch.rand(10, generator=generator) < 0.9).double()
        costs = chain(groups, (3, 2), [18 + 20 * torch.rand(1, generator=generator).item()])
        classes = [("g0", "g1")]
        found = select_units(score, groups, is_open, costs, round_to=round_to, classes=classes)
        assert is_uniform(found)
        assert fits(costs, found)
        best = max((score @ mask).item() for mask in every if fits(costs, mask))
        assert score @ found >= 0.75 * best
