import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import (
    Bernoulli,
    Beta,
    Cauchy,
    Dirichlet,
    Distribution,
    Gamma,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Laplace,
    Normal,
    TransformedDistribution,
    Uniform,
    constraints,
)
from torch.distributions.transforms import AbsTransform, AffineTransform, SigmoidTransform

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from tests.distributions.oracles import assert_average, integral


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logistic(loc: torch.Tensor, scale: float) -> TransformedDistribution:
    uniform = Uniform(torch.zeros_like(loc), torch.ones_like(loc))
    return TransformedDistribution(
        uniform, [SigmoidTransform().inv, AffineTransform(loc, torch.tensor(scale).double())]
    )


BASES = {
    "normal": Normal(t(-0.7, 0.5, 1.4), t(0.5, 0.05, 1.0)),
    "laplace": Laplace(t(0.2, 0.9), t(0.5, 0.3)),
    "logistic": logistic(t(-1.0, 0.3), 0.4),
    "uniform beyond": Uniform(t(-0.5, -0.1), t(1.5, 3.0)),
    "uniform inside": Uniform(t(0.2), t(0.7)),
    "uniform without 0": Uniform(t(0.25), t(1.75)),
    "uniform without 1": Uniform(t(-0.75), t(0.75)),
    "uniform below": Uniform(t(-2.0), t(-1.0)),
    "uniform above": Uniform(t(1.5), t(2.0)),
    "stretched": TransformedDistribution(
        Uniform(t(0.0), t(1.0)), [AffineTransform(t(-0.1), t(1.2))]
    ),
    "falling": TransformedDistribution(Uniform(t(0.0), t(1.0)), [AffineTransform(t(0.8), t(-1.0))]),
}
bases = pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())


def probability_between(gate: hc.Rectified, index: int) -> float:
    """The integral of the density alone, over the part that the base reaches."""
    one = hc.Rectified(pick(gate.base, index))
    lower, upper = (end.item() for end in one._ends)
    return integral(lambda s: one.log_prob(s).exp(), lower, upper) if lower < upper else 0.0


def pick(base: Distribution, index: int) -> Distribution:
    """One gate of a batch, as a distribution of its own."""
    if isinstance(base, TransformedDistribution):
        transforms = [
            AffineTransform(
                *(
                    torch.as_tensor(v).double().expand(base.batch_shape)[index]
                    for v in (part.loc, part.scale)
                )
            )
            if isinstance(part, AffineTransform)
            else part
            for part in base.transforms
        ]
        return TransformedDistribution(pick(base.base_dist, index), transforms)
    return type(base)(**{name: getattr(base, name)[index] for name in base.arg_constraints})


@pytest.mark.unwatched
@bases
def test_the_parts_sum_to_one(base: Distribution) -> None:
    gate = hc.Rectified(base, validate_args=False)
    ends = torch.tensor([[0.0], [1.0]]).double()
    masses = gate.log_prob(ends).exp()
    for index in range(len(masses[0])):
        total = masses[:, index].sum().item() + probability_between(gate, index)
        assert total == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(masses[0], gate.closed_probability)
    torch.testing.assert_close(gate.open_probability, 1 - gate.closed_probability)


@bases
def test_moments_match_integration_and_samples(base: Distribution) -> None:
    gate = hc.Rectified(base)
    for index in range(gate.batch_shape.numel()):
        one = hc.Rectified(pick(base, index))
        lower, upper = (end.item() for end in one._ends)
        survival = [
            integral(lambda s, k=k, one=one: k * s ** (k - 1) * (1 - one.cdf(s)), lower, upper)
            for k in (1, 2)
        ]
        mean, second = lower + survival[0], lower**2 + survival[1]
        assert gate.mean[index].item() == pytest.approx(mean, abs=1e-8)
        assert gate.variance[index].item() == pytest.approx(second - mean**2, abs=1e-8)
    samples = gate.sample((1_000_000,))
    assert samples.min() >= 0
    assert samples.max() <= 1
    assert_average(samples, gate.mean)
    assert_average((samples - gate.mean).square(), gate.variance)
    assert_average((samples > 0).double(), gate.open_probability)
    for value in (0.0, 0.3, 0.5, 0.9, 1.0):
        cdf = hc.Rectified(base, validate_args=False).cdf(t(value))
        assert_average((samples <= value).double(), cdf)


@bases
def test_icdf_inverts_the_cdf(base: Distribution) -> None:
    gate = hc.Rectified(base, validate_args=False)
    quantiles = torch.linspace(0.01, 0.99, 99, dtype=torch.float64).view(-1, 1)
    try:
        values = gate.icdf(quantiles)
    except NotImplementedError:
        pytest.skip(f"{type(base).__name__} has no icdf")
    assert (gate.cdf(values) >= quantiles - 1e-9).all()
    between = (values > 0) & (values < 1)
    torch.testing.assert_close(
        gate.cdf(values)[between], quantiles.expand_as(values)[between], rtol=0, atol=1e-9
    )
    torch.testing.assert_close(gate.readout("median"), gate.icdf(t(0.5)).expand(gate.batch_shape))


def test_gradients() -> None:
    loc, scale = t(-0.5, 0.4, 1.2).requires_grad_(), t(0.6).requires_grad_()
    value = t(0.0, 0.3, 1.0)

    def everything(loc: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = hc.Rectified(Normal(loc, scale))
        torch.manual_seed(1)
        return (
            gate.open_probability,
            gate.mean,
            gate.variance,
            gate.log_prob(value),
            gate.cdf(value),
            gate.rsample((5,)),
        )

    assert gradcheck(everything, (loc, scale))


def test_gradients_of_interval_ends() -> None:
    low, high = t(0.2, -0.5).requires_grad_(), t(0.8, 1.5).requires_grad_()

    def moments(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = hc.Rectified(Uniform(low, high))
        return gate.mean, gate.variance, gate.open_probability

    assert gradcheck(moments, (low, high))


def test_supports_that_exclude_the_ends() -> None:
    gate = hc.Rectified(Uniform(t(0.2), t(0.7)))
    assert gate.closed_probability == 0
    assert gate.open_probability == 1
    torch.testing.assert_close(gate.mean, t(0.45))
    torch.testing.assert_close(gate.variance, t(0.25 / 12))
    loose = hc.Rectified(Uniform(t(0.2), t(0.7)), validate_args=False)
    expected = t(-math.inf, -math.inf, math.log(2), -math.inf, -math.inf, -math.inf)
    torch.testing.assert_close(loose.log_prob(t(-0.1, 0.0, 0.5, 0.8, 1.0, 1.2)), expected)
    torch.testing.assert_close(loose.cdf(t(-1.0, 0.1, 0.45, 0.9, 2.0)), t(0, 0, 0.5, 1, 1))
    with pytest.raises(ValueError, match="within the support"):
        gate.log_prob(t(0.1))


def test_an_impossible_mass_has_finite_gradients() -> None:
    low = t(0.2).requires_grad_()
    hc.Rectified(Uniform(low, t(2.0))).log_prob(t(1.0)).sum().backward()
    assert low.grad.isfinite().all()


def test_a_gate_that_is_always_closed_or_open() -> None:
    shut, open_ = hc.Rectified(Uniform(t(-2.0), t(-1.0))), hc.Rectified(Uniform(t(2.0), t(3.0)))
    assert (shut.mean, open_.mean) == (0, 1)
    assert (shut.variance, open_.variance) == (0, 0)
    assert (shut.readout("binary"), open_.readout("binary")) == (0, 1)


def test_batch_shapes_and_expand() -> None:
    gate = hc.Rectified(Normal(torch.zeros(3), 1.0))
    wide = gate.expand((2, 3))
    assert wide.batch_shape == (2, 3)
    assert wide.event_shape == ()
    assert wide.sample((4,)).shape == (4, 2, 3)
    torch.testing.assert_close(wide.mean, gate.mean.expand(2, 3))
    assert wide.log_prob(torch.zeros(3)).shape == (2, 3)
    assert wide.log_prob(torch.tensor(0.5)).shape == (2, 3)
    with pytest.raises(ValueError, match="not broadcastable"):
        wide.log_prob(torch.zeros(4))
    assert not gate.expand((3,))._validate_args ^ gate._validate_args


def test_support_is_declared() -> None:
    assert constraints.is_dependent(hc.Rectified.support)
    support = hc.Rectified(Uniform(-0.5, 0.7)).support
    assert (support.lower_bound, support.upper_bound) == (0, pytest.approx(0.7))
    with pytest.raises(ValueError, match="within the support"):
        hc.Rectified(Normal(0.0, 1.0)).cdf(torch.tensor(1.5))
    assert hc.Rectified(Normal(0.0, 1.0), validate_args=False).cdf(torch.tensor(1.5)) == 1


def test_samples_without_and_with_gradient() -> None:
    loc = torch.zeros(3, requires_grad=True)
    gate = hc.Rectified(Normal(loc, 0.1))
    assert not gate.sample().requires_grad
    assert gate.rsample().requires_grad


def test_readouts() -> None:
    gate = hc.Rectified(Normal(t(-0.2, 0.3, 2.0), 1.0))
    torch.testing.assert_close(gate.readout("median"), t(0.0, 0.3, 1.0))
    torch.testing.assert_close(gate.readout("mean"), gate.mean)
    torch.testing.assert_close(gate.readout("binary"), t(0.0, 1.0, 1.0))
    with pytest.raises(ArgumentError, match="'paper' is not known to Rectified"):
        gate.readout("paper")


def test_repr_names_the_base() -> None:
    assert repr(hc.Rectified(Normal(0.0, 1.0))) == "Rectified(Normal(loc: 0.0, scale: 1.0))"


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (Bernoulli(0.5), "continuous base with rsample"),
        (Dirichlet(torch.ones(3)), "scalar base"),
        (Beta(torch.ones(3), torch.ones(3)), "base with a cdf"),
        (TransformedDistribution(Beta(1.0, 1.0), [AffineTransform(-0.1, 1.2)]), "Beta has none"),
        (hc.Rectified(Normal(0.0, 1.0)), "rectified already"),
        (0.5, "torch.distributions.Distribution, not float"),
    ],
)
def test_unusable_bases_are_refused(base: Distribution, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.Rectified(base)


def test_heavy_tails() -> None:
    gate = hc.Rectified(Cauchy(t(0.0), t(1.0)))
    torch.testing.assert_close(gate.open_probability, t(0.5))
    assert gate.mean.item() == pytest.approx(
        integral(lambda s: 1 - gate.cdf(s.view(1)).squeeze()), abs=1e-12
    )


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.02])
def test_narrow_bases_are_resolved(scale: float) -> None:
    gate = hc.Rectified(Normal(t(0.37), t(scale)))
    torch.testing.assert_close(gate.mean, t(0.37), rtol=0, atol=1e-9)
    torch.testing.assert_close(gate.stddev, t(scale), rtol=1e-5, atol=0)


def test_tails_are_exact_where_a_cdf_is_rounded() -> None:
    gate = hc.Rectified(Normal(torch.tensor([-6.0, 9.0]), 1.0))
    assert gate.open_probability[0].item() == pytest.approx(9.866e-10, rel=1e-3)
    assert gate.closed_probability[1].item() == pytest.approx(1.129e-19, rel=1e-3)
    assert gate.log_prob(torch.tensor([1.0, 0.0])).isfinite().all()


@pytest.mark.parametrize("base", [HalfNormal(t(0.7)), HalfCauchy(t(0.4)), Gumbel(t(0.2), t(0.5))])
def test_other_bases_of_torch(base: Distribution) -> None:
    gate = hc.Rectified(base)
    samples = gate.sample((200_000,))
    assert_average(samples, gate.mean)
    assert_average((samples > 0).double(), gate.open_probability)
    assert_average((samples < 1).double(), 1 - gate.log_prob(t(1.0)).exp())


def test_a_base_without_icdf_has_moments_and_no_median() -> None:
    gate = hc.Rectified(Gamma(t(2.0), t(3.0)))
    assert_average(gate.sample((200_000,)), gate.mean)
    with pytest.raises(ArgumentError, match="need a base with an icdf; Gamma has none"):
        gate.readout("median")


def test_a_folded_base_without_a_cdf_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is unknown after abs"):
        hc.Rectified(TransformedDistribution(Normal(0.0, 1.0), [AbsTransform()]))


def test_reading_draws_nothing_and_keeps_no_graph() -> None:
    loc = t(0.2).requires_grad_()
    base = TransformedDistribution(Uniform(t(0.0), t(1.0)), [AffineTransform(loc, t(0.5))])
    state = torch.get_rng_state()
    gate = hc.Rectified(base)
    for _ in range(2):
        (gate.mean + gate.variance + gate.open_probability).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_not_a_number_stays_one() -> None:
    gate = hc.Rectified(Normal(0.0, 1.0), validate_args=False)
    assert gate.log_prob(torch.tensor(math.nan)).isnan()


def test_samples_with_a_generator() -> None:
    gate = hc.Rectified(Normal(torch.zeros(5), 1.0))
    state = torch.get_rng_state()
    first, second = (
        gate.rsample((3,), generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert_average(gate.rsample((200_000,), generator=torch.Generator().manual_seed(2)), gate.mean)


def test_vmap_over_gates() -> None:
    def mean(loc: torch.Tensor) -> torch.Tensor:
        return hc.Rectified(Normal(loc, 1.0, validate_args=False), validate_args=False).mean

    locations = torch.linspace(-1, 1, 5)
    expected = hc.Rectified(Normal(locations, 1.0)).mean
    torch.testing.assert_close(torch.vmap(mean)(locations), expected)
