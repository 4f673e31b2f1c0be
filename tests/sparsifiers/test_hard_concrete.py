import math

import pytest
import torch
from torch.distributions import Normal

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers import RectifiedGates
from tests.sparsifiers.families import FixedMask

LOCATIONS = {"log_alpha": torch.tensor([-3.0, -1.0, 0.0, 2.0])}


def test_the_family_asks_the_distribution() -> None:
    family, law = RectifiedGates(), hc.HardConcrete(LOCATIONS["log_alpha"])
    assert torch.equal(family.open_probability(LOCATIONS), law.open_probability)
    assert torch.equal(family.mean(LOCATIONS), law.mean)
    for rule in family.readouts:
        assert torch.equal(family.readout(LOCATIONS, rule), law.readout(rule))
        assert torch.equal(family.is_open(LOCATIONS, rule), law.readout(rule) > 0)
    torch.manual_seed(1)
    sample = family.sample(LOCATIONS, (5,))
    torch.manual_seed(1)
    assert torch.equal(sample, law.rsample((5,)))


def test_locations_start_at_the_odds_to_stay() -> None:
    droprates = [0.01, 0.05, 0.3, 0.5]
    start = RectifiedGates().start(torch.tensor(droprates, dtype=torch.float64))["log_alpha"]
    odds = [math.log1p(-p) - math.log(p) for p in droprates]
    assert torch.equal(start, torch.tensor(odds, dtype=torch.float32))
    RectifiedGates().spread({"log_alpha": start})
    assert not torch.equal(start, torch.tensor(odds, dtype=torch.float32))


@pytest.mark.parametrize("rule", ["paper", "median", "mean", "binary"])
def test_certain_gates_are_0_or_1(rule: str) -> None:
    is_open, family = torch.tensor([True, False]), RectifiedGates()
    values = family.readout(family.certain(is_open), rule)
    torch.testing.assert_close(values, is_open.float(), rtol=0, atol=1e-6)
    removed = family.removed(torch.zeros(2, dtype=torch.bool))
    assert (removed["log_alpha"] < family.certain(is_open)["log_alpha"].min()).all()
    assert not family.is_open(removed, rule).any() or rule == "mean"


def test_closed_gates_have_no_gradient_unless_a_sampler_is_new() -> None:
    class Own(hc.HardConcrete):
        def rsample(self, *args: object, **settings: object) -> torch.Tensor:
            return super().rsample(*args, **settings) + 0

    assert RectifiedGates().is_flat(LOCATIONS)
    assert RectifiedGates(lambda a: hc.Rectified(Normal(a, 1.0))).is_flat(LOCATIONS)
    assert not RectifiedGates(Own).is_flat(LOCATIONS)
    assert not FixedMask().is_flat({})


def test_a_gate_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ArgumentError, match="gate must be callable on log_alpha, not a int"):
        RectifiedGates(3)
    with pytest.raises(ArgumentError, match="gate must be callable on log_alpha alone: too"):
        RectifiedGates(lambda: hc.HardConcrete(0.0))
