"""Divergences against integrals and draws, and the noise of weights in layers."""

import math

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers import (
    GroupHorseshoe,
    GroupNormalJeffreys,
    SparseVD,
    UnitWeights,
)
from hardconcrete.sparsifiers.bayesian_compression import weight_divergence
from hardconcrete.sparsifiers.horseshoe import gamma_divergence, inverse_gamma_divergence
from hardconcrete.sparsifiers.log_uniform import log_alpha, log_uniform_divergence

GRID = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
NORMAL = (-0.5 * GRID.square()).exp() / math.sqrt(2 * math.pi)
STEP = 24 / 2_000_000


def expectation(values: Tensor) -> float:
    """Of a function of standard normal noise, by the trapezoidal rule."""
    return float((values * NORMAL).sum() * STEP)


@pytest.mark.parametrize("log_ratio", [-8.0, -4.0, -2.0, 0.0, 1.0, 3.0, 6.0, 10.0])
def test_the_log_uniform_divergence(log_ratio: float) -> None:
    """-KL = log(alpha) / 2 - E log|1 + sqrt(alpha) e|, with the limit 0: within the fit's 0.01."""
    deviation = math.exp(log_ratio / 2)
    exact = -(0.5 * log_ratio - expectation((1 + deviation * GRID).abs().clamp_min(1e-300).log()))
    limit = expectation(GRID.abs().clamp_min(1e-7).log())
    found = log_uniform_divergence(torch.tensor([log_ratio])).item()
    assert found == pytest.approx(exact - limit, abs=0.012)


@pytest.mark.parametrize("mean", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("log_variance", [-9.0, -1.0, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e-2, 7.0])
def test_the_divergences_of_the_horseshoe(mean: float, log_variance: float, scale: float) -> None:
    """Against the densities of torch, at 2 million points of noise."""
    deviation = math.exp(log_variance / 2)
    log_x = mean + deviation * GRID
    log_q = -0.5 * GRID.square() - 0.5 * math.log(2 * math.pi) - math.log(deviation) - log_x
    a, b = torch.tensor([mean]).double(), torch.tensor([log_variance]).double()
    gamma = torch.distributions.Gamma(torch.tensor(0.5).double(), 1 / scale)
    exact = expectation(log_q - gamma.log_prob(log_x.exp().clamp_min(1e-300)))
    assert gamma_divergence(a, b, scale).item() == pytest.approx(exact, rel=1e-6, abs=1e-6)
    inverse = torch.distributions.InverseGamma(
        torch.tensor(0.5).double(), torch.tensor(1.0).double()
    )
    exact = expectation(log_q - inverse.log_prob(log_x.exp().clamp_min(1e-300)))
    assert inverse_gamma_divergence(a, b).item() == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_products_of_these_priors_are_half_cauchy() -> None:
    """Three shares of 10^6 draws within 5 standard errors: one seed in 500,000 fails."""
    torch.manual_seed(0)
    scale = torch.distributions.Gamma(torch.tensor(0.5), 1 / 3.0**2).sample((1_000_000,))
    inverse = torch.distributions.InverseGamma(torch.tensor(0.5), torch.tensor(1.0))
    s = (scale * inverse.sample((1_000_000,))).sqrt()
    for point in (0.5, 3.0, 20.0):
        p = 2 / math.pi * math.atan(point / 3)
        assert abs((s < point).float().mean() - p) < 5 * math.sqrt(p * (1 - p)) / 1000


def test_the_divergence_of_weights() -> None:
    torch.manual_seed(0)
    rows, variances = torch.randn(3, 4), torch.randn(3, 4)
    posterior = torch.distributions.Normal(rows, (0.5 * variances).exp())
    prior = torch.distributions.Normal(0.0, 1.0)
    exact = torch.distributions.kl_divergence(posterior, prior).sum(1)
    torch.testing.assert_close(weight_divergence(UnitWeights((rows,), (variances,))), exact)


@pytest.mark.parametrize("family", [GroupNormalJeffreys(), GroupHorseshoe()])
def test_draws_and_certain_gates(family: GroupNormalJeffreys | GroupHorseshoe) -> None:
    """Two means of 10^6 draws within 5 standard errors: one seed in 800,000 fails."""
    torch.manual_seed(0)
    parameters = family.start(torch.tensor([0.01, 0.3], dtype=torch.float64))
    with torch.no_grad():
        z = family.sample(parameters, (1_000_000,))
        assert ((z.mean(0) - family.mean(parameters)).abs() < 5 * z.std(0) / 1000).all()
        values = family.readout(family.certain(torch.tensor([True, False])), "threshold")
    torch.testing.assert_close(values, torch.tensor([1.0, 0.0]))


def test_thresholds() -> None:
    gates = {"mu": torch.tensor([1.0, -0.5, 0.1]), "log_variance": torch.full((3,), -5.0)}
    family = GroupNormalJeffreys()
    assert family.is_open(gates, "threshold").tolist() == [True, True, False]
    assert family.readout(gates, "threshold").tolist() == [1.0, -0.5, 0.0]
    weights = UnitWeights((torch.tensor([[1.0], [0.1]]),), (torch.full((2, 1), -1.0),))
    assert SparseVD().keeps({}, weights).tolist() == [1, 0]
    assert log_alpha(torch.tensor([0.1]), torch.tensor([-1.0])).item() == pytest.approx(3.605, 1e-3)
    for make in (GroupNormalJeffreys, GroupHorseshoe, SparseVD):
        with pytest.raises(ArgumentError, match="threshold=nan"):
            make(threshold=math.nan)


LAYERS = {
    "dense": (lambda: nn.Linear(6, 3), lambda n: torch.randn(n, 6)),
    "conv": (lambda: nn.Conv2d(6, 3, 3, padding=1), lambda n: torch.randn(n, 6, 4, 4)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("method", ["gnj", "sparse-vd"])
def test_a_layer_has_the_noise_of_its_weights(kind: str, count: int, method: str) -> None:
    """Means and deviations of 1,500 calls are those of drawn weights, within 6 standard errors.

    Some 204 outputs are compared twice: one seed in a million fails.
    """
    torch.manual_seed(0)
    build, inputs = LAYERS[kind]
    layer, x = build(), inputs(count)
    sites = [":in"] if method == "gnj" else "auto"
    gated = hc.attach_gates(layer, x, sites=sites, method=method)
    with torch.no_grad():
        gated.gates.log_variances["weight"].normal_(-2.0, 0.5)
    weight = layer._parameters["weight"].detach()
    deviation = (0.5 * gated.gates.log_variances["weight"].detach()).exp()
    bias = layer.bias.detach()
    operator = nn.functional.linear if kind == "dense" else layer._conv_forward
    with torch.no_grad():
        found = torch.stack([gated(x)[0] for _ in range(1500)])
        drawn = [weight + deviation * torch.randn_like(weight) for _ in range(1500)]
        slow = torch.stack([operator(x[:1], w, bias)[0] for w in drawn])
    error = 6 * ((found.var(0) + slow.var(0)) / 1500).sqrt()
    assert ((found.mean(0) - slow.mean(0)).abs() < error).all()
    assert (found.std(0) / slow.std(0)).log().abs().max() < 6 / math.sqrt(1500)
    torch.testing.assert_close(gated.eval()(x), operator(x, weight, bias))


def test_examples_have_noise_of_their_own() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(nn.Linear(6, 3), torch.ones(2, 6), method="sparse-vd")
    gated.gates.log_variances["weight"].data.fill_(0.0)
    assert len(gated(torch.ones(5, 6))[:, 0].unique()) == 5


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def test_variances_learn_are_saved_and_rest_when_frozen() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(mlp(), torch.zeros(2, 4), method="gnj")
    assert "gates.log_variances.2/weight" in gated.state_dict()
    assert "2.weight" in gated.model.state_dict()
    penalty = hc.MethodPenalty(gated, examples=100)
    (gated(torch.randn(9, 4)).square().mean() + penalty()).backward()
    values = gated.gates.log_variances["2/weight"]
    assert values.grad.all()
    other = hc.attach_gates(mlp(), torch.zeros(2, 4), method="gnj")
    values.data.normal_()
    other.load_state_dict(gated.state_dict())
    assert torch.equal(other.gates.log_variances["2/weight"], values)
    gated.double()
    assert values.dtype == torch.float32
    gated.freeze_gates()
    assert not values.requires_grad
    x = torch.randn(9, 4).double()
    assert torch.equal(gated(x), gated(x))


def test_sparse_vd_prunes_single_weights_and_then_units() -> None:
    """The target needs one of three inputs, and of the hidden units few."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    gated = hc.attach_gates(net, torch.zeros(2, 3), method="sparse-vd")
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=2e-2, gate_lr=0.1))
    penalty = hc.MethodPenalty(gated, examples=20, warm_up=50)
    for _ in range(300):
        x = torch.randn(64, 3)
        loss = 50 * (gated(x)[:, 0] - x[:, 0]).square().mean() + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.step()
    mark = gated.gates.mark[:24].view(8, 3)
    assert mark[:, 1:].sum() < mark[:, 0].sum() < 8
    x = torch.randn(200, 3)
    small = hc.compact(gated.eval())
    assert small[0].out_features < 8
    torch.testing.assert_close(small(x), gated(x))
    assert (small(x)[:, 0] - x[:, 0]).square().mean() < 0.05


def test_a_budget_of_single_weights_is_refused() -> None:
    gated = hc.attach_gates(nn.Linear(3, 2), torch.zeros(2, 3), method="sparse-vd")
    for by in ("importance", "gates"):
        with pytest.raises(ArgumentError, match="SparseVD has single weights, which have no"):
            hc.Budget(gated, macs=0.5, steps=300, by=by)


def test_no_layer_with_weights_is_refused() -> None:
    with pytest.raises(hc.HardConcreteError, match="no dense or convolutional layer whose weights"):
        hc.attach_gates(nn.LayerNorm(3), torch.zeros(2, 3), method="sparse-vd")
