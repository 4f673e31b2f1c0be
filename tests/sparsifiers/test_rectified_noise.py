import pytest
import torch

from hardconcrete.sparsifiers import RectifiedGates, RectifiedGaussian, RectifiedLogistic

FAMILIES = [RectifiedGaussian(), RectifiedLogistic(), RectifiedGaussian(0.2)]
LOCATIONS = {"log_alpha": torch.tensor([-1.0, -0.1, 0.3, 0.5, 1.2])}


@pytest.mark.parametrize("family", FAMILIES)
def test_open_probability_and_mean_are_those_of_draws(family: RectifiedGates) -> None:
    """Ten averages of 10^6 draws within 5 standard errors: one seed in 150,000 fails."""
    torch.manual_seed(0)
    z = family.sample(LOCATIONS, (1_000_000,))
    for samples, expected in (
        (z, family.mean(LOCATIONS)),
        ((z > 0).float(), family.open_probability(LOCATIONS)),
    ):
        error = (samples.mean(0) - expected).abs()
        assert (error <= 5 * samples.std(0) / 1000 + 1e-6).all()
    assert (z == 0).any()
    assert (z == 1).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_start_above_one_half_with_the_probability_to_stay(family: RectifiedGates) -> None:
    """Three shares of 10^6 draws within 5 standard errors: one seed in 500,000 fails."""
    torch.manual_seed(0)
    droprate = torch.tensor([0.05, 0.3, 0.5], dtype=torch.float64)
    start = family.start(droprate)
    above = (family.sample(start, (1_000_000,)) > 0.5).double().mean(0)
    assert ((above - (1 - droprate)).abs() < 5 * (droprate * (1 - droprate)).sqrt() / 1000).all()
    assert (family.readout(start, "median")[0] == 1) == (family.scale > 0.25)


@pytest.mark.parametrize("family", FAMILIES)
def test_certain_gates(family: RectifiedGates) -> None:
    values = family.readout(family.certain(torch.tensor([True, False])), "median")
    assert values.tolist() == [1, 0]
