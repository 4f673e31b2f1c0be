import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import (
    Distribution,
    Laplace,
    Normal,
    TransformedDistribution,
    Uniform,
    kl_divergence,
)
from torch.distributions.transforms import AffineTransform

import hardconcrete as hc
from hardconcrete.distributions.kl import kl_rectified
from tests.distributions.oracles import divergence


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def hard(log_alpha: float, temperature: float | torch.Tensor = 2 / 3, **stretch: float):
    return hc.HardConcrete(number(log_alpha), temperature, **stretch)


def stretched_uniform() -> hc.Rectified:
    base = Uniform(number(0.0), number(1.0))
    return hc.Rectified(TransformedDistribution(base, [AffineTransform(-0.3, 1.5)]))


PAIRS = {
    "equal": (hard(0.4), hard(0.4)),
    "close": (hard(0.4), hard(0.4001)),
    "above": (hard(2.0), hard(-1.0)),
    "below": (hard(-2.0), hard(1.5)),
    "far": (hard(-9.0), hard(12.0)),
    "series edge": (hard(0.0), hard(-0.2231)),
    "temperatures": (hard(0.5, 0.5), hard(-0.5, 0.9)),
    "stretches": (hard(0.5), hard(0.5, low=-0.5, high=1.2)),
    "normal prior": (hard(-1.0), hc.Rectified(Normal(number(0.1), number(0.5)))),
    "normals": (
        hc.Rectified(Normal(number(0.2), number(0.3))),
        hc.Rectified(Normal(number(0.6), number(0.5))),
    ),
    "laplace": (hc.Rectified(Laplace(number(0.5), number(0.5))), hard(0.0)),
    "uniform": (stretched_uniform(), hard(0.3)),
}
pairs = pytest.mark.parametrize(("q", "p"), PAIRS.values(), ids=PAIRS.keys())


@pairs
def test_fine_numerical_integration(q: Distribution, p: Distribution) -> None:
    tolerance = 1e-4 if isinstance(q.base, Laplace) else 1e-10  # its density has a kink
    assert kl_divergence(q, p).item() == pytest.approx(divergence(q, p), abs=tolerance)


@pairs
def test_results_repeat_and_are_not_negative(q: Distribution, p: Distribution) -> None:
    first = kl_divergence(q, p)
    assert torch.equal(first, kl_divergence(q, p))
    assert first >= -1e-12


def test_the_closed_form_agrees_with_quadrature() -> None:
    q = hc.HardConcrete(torch.linspace(-8, 8, 33).double())
    p = hc.HardConcrete(torch.linspace(-7, 9, 17).double().view(-1, 1))
    torch.testing.assert_close(kl_divergence(q, p), kl_rectified(q, p), rtol=1e-9, atol=1e-11)


def test_it_is_not_the_divergence_before_rectification() -> None:
    """Appendix C, last sentence; data processing makes it the smaller of the two."""
    q, p = hc.Rectified(Normal(0.2, 0.5)), hc.Rectified(Normal(0.8, 0.9))
    before = kl_divergence(q.base, p.base)
    assert kl_divergence(q, p) < 0.95 * before


@pytest.mark.parametrize("temperature", [2 / 3, 0.4], ids=["closed form", "quadrature"])
def test_gradients(temperature: float) -> None:
    q = torch.tensor([-3.0, 0.0, 0.5, 0.8, 6.0]).double().requires_grad_()
    p = torch.tensor([1.0, 0.0, 0.5, 0.75, -6.0]).double().requires_grad_()

    def divergences(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return kl_divergence(hc.HardConcrete(q), hc.HardConcrete(p, temperature))

    assert gradcheck(divergences, (q, p))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("temperature", [2 / 3, 0.5])
def test_extreme_locations_stay_finite(temperature: float, autocast: bool) -> None:
    places = torch.tensor([-100.0, -50.0, -1.0, 0.0, 50.0, 100.0])
    q = places.clone().requires_grad_()
    p = places.clone().view(-1, 1).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = kl_divergence(hc.HardConcrete(q), hc.HardConcrete(p, temperature))
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    value.sum().backward()
    assert q.grad.isfinite().all()
    assert p.grad.isfinite().all()


def test_single_precision_is_enough_for_training() -> None:
    q, p = torch.randn(1000) * 3, torch.randn(1000) * 3
    single = kl_divergence(hc.HardConcrete(q), hc.HardConcrete(p))
    double = kl_divergence(hc.HardConcrete(q.double()), hc.HardConcrete(p.double()))
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=2e-6)


def test_equal_temperatures_are_recognised() -> None:
    shared = number(0.6)
    expected = kl_divergence(hard(1.0, 0.6), hard(0.0, 0.6))
    for other in (shared, number(0.6)):
        value = kl_divergence(hard(1.0, shared), hard(0.0, other))
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-13)
    different = kl_divergence(hard(1.0, shared), hard(0.0, number(0.7)))
    assert different.item() == pytest.approx(divergence(hard(1.0, 0.6), hard(0.0, 0.7)), abs=1e-10)


def test_gradients_of_temperatures_that_happen_to_be_equal() -> None:
    first, second = number(0.6).requires_grad_(), number(0.6).requires_grad_()

    def apart(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return kl_divergence(hard(1.0, first), hard(0.0, second))

    assert gradcheck(apart, (first, second))
    assert gradcheck(lambda shared: apart(shared, shared), (first,))
    assert gradcheck(lambda learnt: kl_divergence(hard(0.3, learnt), hard(0.3, 0.6)), (first,))


@pytest.mark.parametrize(
    ("q", "p", "expected"),
    [
        (Normal(0.37, 1e-4), Normal(0.5, 0.5), 8.0507),
        (Normal(0.4142, 1e-3), Normal(0.5, 0.5), 5.7294),
        (Normal(0.0, 1.0), Normal(-8.0, 1.0), None),
    ],
)
def test_narrow_and_distant_pairs(q: Normal, p: Normal, expected: float | None) -> None:
    q, p = (Normal(d.loc.double(), d.scale.double()) for d in (q, p))
    value = kl_divergence(hc.Rectified(q), hc.Rectified(p)).item()
    if expected is None:
        expected = divergence(hc.Rectified(q), hc.Rectified(p))
    assert value == pytest.approx(expected, rel=1e-4)


def test_an_improbable_prior_has_a_finite_divergence() -> None:
    value = kl_divergence(hc.HardConcrete(0.0), hc.Rectified(Normal(-5.0, 1.0)))
    assert value.item() == pytest.approx(13.305, abs=1e-2)


def test_a_prior_without_the_support_has_infinite_divergence() -> None:
    inside = hc.Rectified(Uniform(number(0.2), number(0.7)))
    reaching = hc.Rectified(Uniform(number(-0.5), number(1.5)))
    assert kl_divergence(reaching, inside) == math.inf
    assert kl_divergence(inside, reaching).item() == pytest.approx(math.log(4))
    assert kl_divergence(inside, hc.Rectified(Uniform(number(0.3), number(2.0)))) == math.inf


def test_batches_broadcast() -> None:
    q, p = hc.HardConcrete(torch.zeros(3)), hc.HardConcrete(torch.ones(2, 1))
    assert kl_divergence(q, p).shape == (2, 3)
    normal = hc.Rectified(Normal(torch.zeros(2, 1), 1.0))
    assert kl_divergence(q, normal).shape == (2, 3)
    assert kl_divergence(normal, q).shape == (2, 3)


@pytest.mark.early
@pytest.mark.unwatched
@pytest.mark.parametrize("temperature", [2 / 3, 0.5], ids=["closed form", "quadrature"])
def test_compiles_without_a_break(temperature: float) -> None:
    def penalty(log_alpha: torch.Tensor) -> torch.Tensor:
        prior = hc.HardConcrete(torch.zeros(()), temperature)
        return kl_divergence(hc.HardConcrete(log_alpha), prior).sum()

    log_alpha = torch.linspace(-2, 2, 9, requires_grad=True)
    compiled = torch.compile(penalty, fullgraph=True)(log_alpha)
    torch.testing.assert_close(compiled, penalty(log_alpha))
    torch.testing.assert_close(
        torch.autograd.grad(compiled, log_alpha)[0],
        torch.autograd.grad(penalty(log_alpha), log_alpha)[0],
    )
