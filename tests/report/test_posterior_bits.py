import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.report import posterior_bits
from hardconcrete.report.posterior_bits import posterior


def make(method: str) -> hc.GatedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    gated = hc.attach_gates(model, torch.zeros(2, 4), method=method)
    is_open = torch.ones(gated.gates.count, dtype=torch.bool)
    is_open[:3] = False
    gated.gates.set_open(is_open)
    return gated


@pytest.mark.parametrize("log_variance", [-12.0, -9.0, -5.0, -3.0])
def test_the_rounding_error_is_below_the_deviation_and_one_bit_less_is_too_few(
    log_variance: float,
) -> None:
    gated = make("gnj")
    gated.gates.log_variances["2/weight"].data.fill_(log_variance)
    small = hc.compact(gated)
    (bits,) = posterior_bits(gated, small).bits.values()
    weight = small[2].weight.detach()
    deviation = torch.tensor(log_variance / 2).exp()
    for count, fits in ((bits, True), (bits - 1, False)):
        step = 2 * weight.abs().max() / (2**count - 2)
        assert (step / 2 <= deviation) == fits
    step = 2 * weight.abs().max() / (2**bits - 2)
    rounded = (weight / step).round() * step
    assert (rounded - weight).abs().max() <= deviation


@pytest.mark.parametrize("method", ["gnj", "ghs"])
def test_the_posterior_is_that_of_draws(method: str) -> None:
    """Ten means and variances of 10^5 draws within 10%: six standard errors and more."""
    gated = make(method)
    with torch.no_grad():
        gated.gates.log_variances["2/weight"].normal_(-3.0, 0.5)
        for name in {"log_variance", "log_a_variance"} & {*gated.gates.names}:
            getattr(gated.gates, name)[3:] = -4.0
        mean, variance = posterior(gated)["2.weight"]
        z = gated.gates.draw((100_000,))[:, None, 3:]
        deviation = (0.5 * gated.gates.log_variances["2/weight"][:, 3:]).exp()
        weight = gated.model[2]._parameters["weight"][:, 3:]
        draws = z * (weight + deviation * torch.randn(100_000, 2, 5))
    torch.testing.assert_close(variance, draws.var(0).flatten(), rtol=0.1, atol=0)
    torch.testing.assert_close(mean, draws.mean(0).flatten(), rtol=0.1, atol=0.01)


def test_the_rate() -> None:
    gated = make("gnj")
    result = posterior_bits(gated, hc.compact(gated))
    bits = result.bits["2.weight"]
    dense, rest = 4 * 8 + 8 + 16 + 2, 4 * 5 + 5 + 2
    assert result.rate == pytest.approx(32 * dense / (32 * rest + bits * 10))
    assert str(result).startswith(f"bits: 2.weight {bits}; ")


def test_single_weights() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), method="sparse-vd")
    assert 1 <= posterior_bits(gated, hc.compact(gated)).bits["weight"] < 32


def test_gates_without_a_posterior_are_refused() -> None:
    gated = make("sbp")
    with pytest.raises(ArgumentError, match="SBP gates leave the weights without a posterior"):
        posterior_bits(gated, gated)
