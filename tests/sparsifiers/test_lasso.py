"""Proximal steps against a search for the minimum that they stand for."""

import math

import pytest
import torch

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers import L1, GroupLasso, Magnitude, UnitWeights
from hardconcrete.sparsifiers.marked import MarkedUnits

ROWS = torch.tensor(
    [[0.4, -0.2, 0.1], [2.0, -1.0, 0.5], [0.0, 0.0, 0.0], [0.9, 0.0, -0.01]], dtype=torch.float64
)


def cost(family: MarkedUnits, rows: torch.Tensor) -> torch.Tensor:
    """The penalty in float64, written out."""
    if isinstance(family, L1):
        return family.lam * rows.abs().sum(1)
    return family.lam * math.sqrt(rows.shape[1]) * rows.square().sum(1).sqrt()


@pytest.mark.parametrize("family", [GroupLasso(3.0), L1(3.0)])
@pytest.mark.parametrize("amount", [0.0, 0.02, 0.1, 1.0])
def test_a_step_is_the_minimum(family: MarkedUnits, amount: float) -> None:
    """No point of 3,000 around the result, near and far, is better."""
    torch.manual_seed(0)
    best = family.shrunk(ROWS, amount)

    def objective(points: torch.Tensor) -> torch.Tensor:
        return 0.5 * (points - ROWS).square().sum(1) + amount * cost(family, points)

    reached = objective(best)
    for k in range(3_000):
        away = torch.randn_like(ROWS) * 10 ** (-4 * k / 3_000)
        assert (objective(best + away) >= reached - 1e-12).all()


@pytest.mark.parametrize("family", [GroupLasso(3.0), L1(3.0)])
def test_units_become_exactly_zero(family: MarkedUnits) -> None:
    small = family.shrunk(ROWS.float(), 0.15)
    assert not small[0].any()
    assert small[1].any()
    stays = family.keeps({}, UnitWeights((small,)))
    assert stays.tolist() == [0, 1, 0, float(small[3].any())]


@pytest.mark.parametrize("family", [GroupLasso(3.0), L1(3.0)])
def test_the_penalty(family: MarkedUnits) -> None:
    found = family.complexity({}, UnitWeights((ROWS, ROWS[:, :2])))
    expected = torch.cat([cost(family, ROWS), cost(family, ROWS[:, :2])])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)


def test_magnitude_keeps_a_part_of_each_group() -> None:
    rows = torch.tensor([[1.0, 1.0], [0.0, 0.5], [-3.0, 0.0], [0.1, 0.2]])
    weights = UnitWeights((rows, 100 * rows[:3]))
    assert Magnitude(0.5).keeps({}, weights).tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert Magnitude(0.01).keeps({}, weights).sum() == 2
    assert not Magnitude().complexity({}, weights).any()


def test_settings_are_refused() -> None:
    for family in (GroupLasso, L1):
        with pytest.raises(ArgumentError, match="lam=-1 must not be negative or infinite"):
            family(-1)
    with pytest.raises(ArgumentError, match="keep=0 must be a fraction above 0"):
        Magnitude(keep=0)
