"""One mapping between units and indices, in both directions."""

import pytest
import torch

from hardconcrete.units import Axis

UNITS = torch.tensor([1, -1, 0, 1])
EACH = Axis("w", None, torch.arange(8).view(2, 4))


def test_every_index_gets_the_value_of_its_unit() -> None:
    values = torch.tensor([2.0, 3.0])
    assert Axis("w", 1, UNITS).expand(values, fill=7.0).tolist() == [3, 7, 2, 3]
    assert Axis("w", 0, torch.arange(2)).expand(values, fill=7.0).tolist() == [2, 3]
    assert EACH.expand(torch.arange(8), fill=-1).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_values_broadcast_over_the_tensor() -> None:
    values, weight = torch.tensor([2.0, 3.0]), torch.ones(2, 4)
    rows = Axis("w", 0, torch.arange(2)).spread(values, dims=2) * weight
    assert rows.tolist() == [[2] * 4, [3] * 4]
    columns = Axis("w", 1, UNITS).spread(values, dims=2) * weight
    assert columns.tolist() == [[3, 1, 2, 3]] * 2
    assert (EACH.spread(torch.arange(8.0), dims=2) * weight).flatten().tolist() == [*range(8)]


@pytest.mark.parametrize(
    ("axis", "count", "norms"),
    [
        (Axis("w", 1, UNITS), 2, [2**2 + 6**2, 0 + 3**2 + 4**2 + 7**2]),
        (Axis("w", 0, torch.arange(2)), 2, [0 + 1 + 4 + 9, 16 + 25 + 36 + 49]),
        (EACH, 8, [k**2 for k in range(8)]),
    ],
)
def test_squares_are_summed_by_unit(axis: Axis, count: int, norms: list[float]) -> None:
    weight = torch.arange(8.0).view(2, 4)
    assert axis.squared_norms(weight, count).tolist() == norms


def test_the_largest_value_of_each_unit() -> None:
    axis = Axis("w", 1, UNITS)
    assert axis.largest(torch.tensor([0.2, 0.9, 0.1, 0.4]), 2).tolist() == pytest.approx([0.1, 0.4])
    assert axis.largest(torch.tensor([0.5]), 2).tolist() == [0.5, 0.5]


def test_a_cut_axis_is_renumbered() -> None:
    axis = Axis("w", 1, UNITS).cut({0: torch.tensor([1]), 1: torch.tensor([0, 1, 3])})
    assert axis.units.tolist() == [1, -1, 1]
    renumbered = axis.renumbered(torch.tensor([-1, 0, -1]))
    assert (renumbered.units.tolist(), renumbered.is_one_to_one) == ([0, -1, 0], False)
    corner = EACH.cut({0: torch.tensor([1]), 1: torch.tensor([0, 2])})
    assert corner.units.tolist() == [[4, 6]]
