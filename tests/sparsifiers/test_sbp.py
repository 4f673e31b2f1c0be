"""Against integrals over x = log z on a fine grid, in float64, and against 10^6 draws."""

import math

import pytest
import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers import SBP

PARAMETERS = {
    "mu": torch.tensor([0.0, -0.5, -3.0, -10.0, -19.0, 2.0, -30.0]),
    "log_sigma": torch.tensor([-2.0, 0.0, 1.0, 0.5, 2.0, 0.0, 0.3]),
}
NOISY = torch.tensor([-0.1, -1.0, -4.0, -12.0])


def slow(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """KL, E[z] and the deviation, by the midpoint rule with 2 million points."""
    mu = parameters["mu"].double().clamp(-20, 5)
    sigma = parameters["log_sigma"].double().clamp(-20, 5).exp()
    x = -20 * (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    found = []
    for m, s in zip(mu, sigma, strict=True):
        q = (-0.5 * ((x - m) / s).square()).exp()
        q = q / q.mean() / 20
        kl = (q * (q * 20).clamp_min(1e-300).log()).mean() * 20
        mean = (q * x.exp()).mean() * 20
        found.append((kl, mean, ((q * (2 * x).exp()).mean() * 20 - mean**2).sqrt()))
    return tuple(torch.stack(column).float() for column in zip(*found, strict=True))


def test_the_closed_forms() -> None:
    family = SBP()
    kl, mean, deviation = slow(PARAMETERS)
    torch.testing.assert_close(family.divergence_from_prior(PARAMETERS), kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(family.mean(PARAMETERS), mean, rtol=1e-4, atol=1e-9)
    ratio = family.signal_to_noise(PARAMETERS)
    torch.testing.assert_close(ratio, mean / deviation, rtol=1e-3, atol=0)


def test_draws() -> None:
    """Means of 10^6 draws of four gates within 5 standard errors: one seed in 400,000 fails."""
    torch.manual_seed(0)
    family = SBP()
    parameters = {"mu": NOISY, "log_sigma": torch.tensor([-1.0, 0.5, 1.0, 1.5])}
    z = family.sample(parameters, (1_000_000,))
    _, mean, deviation = slow(parameters)
    assert ((z.mean(0) - mean).abs() < 5 * deviation / 1000).all()
    assert z.min() >= math.exp(-20.01)
    assert z.max() <= 1


def test_gradients_of_a_draw_are_those_of_the_mean() -> None:
    """2 * 10^5 draws of one gate, within 5 standard errors: one seed in 400,000 fails."""
    torch.manual_seed(0)
    family = SBP()
    for name in ("mu", "log_sigma"):
        gate = {"mu": torch.tensor([-1.0]), "log_sigma": torch.tensor([-0.5])}
        gate[name].requires_grad_()
        (exact,) = torch.autograd.grad(family.mean(gate).sum(), gate[name])
        each = {key: value.detach().expand(200_000).clone() for key, value in gate.items()}
        each[name].requires_grad_()
        (slopes,) = torch.autograd.grad(family.sample(each).sum(), each[name])
        assert abs(slopes.mean() - exact) < 5 * slopes.std() / math.sqrt(200_000)


@pytest.mark.parametrize("mu", [-100.0, -20.0, 0.0, 5.0, 100.0])
@pytest.mark.parametrize("log_sigma", [-100.0, -5.0, 5.0, 100.0])
def test_extreme_parameters_stay_finite(mu: float, log_sigma: float) -> None:
    gate = {"mu": torch.tensor([mu]), "log_sigma": torch.tensor([log_sigma])}
    for value in gate.values():
        value.requires_grad_()
    family = SBP()
    parts = family.divergence_from_prior(gate), family.mean(gate), family.sample(gate)
    assert all(part.isfinite().all() for part in parts)
    slopes = torch.autograd.grad(sum(part.sum() for part in parts), [*gate.values()])
    assert all(slope.isfinite().all() for slope in slopes)
    assert family.readout(gate, "snr").isfinite().all()


def test_the_threshold() -> None:
    parameters = {"mu": torch.tensor([0.0, -9.0]), "log_sigma": torch.tensor([-5.0, 2.0])}
    family = SBP()
    assert family.is_open(parameters, "snr").tolist() == [True, False]
    assert family.readout(parameters, "snr")[1] == 0
    assert not SBP(threshold=1e6).is_open(parameters, "snr").any()
    with pytest.raises(ArgumentError, match="threshold=0 must be a ratio above 0"):
        SBP(threshold=0)


def test_certain_gates_and_the_start() -> None:
    family = SBP()
    values = family.readout(family.certain(torch.tensor([True, False])), "snr")
    assert values.tolist() == [1.0, 0.0]
    start = family.start(torch.tensor([SBP.droprate], dtype=torch.float64))
    torch.testing.assert_close(start["log_sigma"], torch.tensor([-5.0]))
