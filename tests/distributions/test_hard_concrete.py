import math
import statistics
import subprocess
import sys
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import hardconcrete as hc
from benchmarks.sampling import compare
from tests.distributions.oracles import assert_average, integral

SETTINGS = list(product([-4.0, -1.0, 0.0, 0.3, 3.0], [0.1, 0.5, 2 / 3, 1.0, 1.5]))
gates = pytest.mark.parametrize(("log_alpha", "temperature"), SETTINGS)


def gate(log_alpha: float, temperature: float = 2 / 3, **stretch: float) -> hc.HardConcrete:
    return hc.HardConcrete(number(log_alpha), temperature, **stretch)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_alpha", [-16.0, -20.0, -40.0, -80.0])
def test_the_mean_of_a_gate_that_is_almost_never_open(log_alpha: float, dtype: torch.dtype) -> None:
    """There 1 - Q(s) is alpha times the odds of s, and no digit may be lost."""
    odds = integral(lambda s: ((1.1 - s) / (s + 0.1)) ** (2 / 3))
    z = hc.HardConcrete(torch.tensor(log_alpha, dtype=dtype))
    assert z.mean.item() == pytest.approx(math.exp(log_alpha) * odds, rel=3e-5)


@gates
def test_the_formulas_of_the_paper(log_alpha: float, temperature: float) -> None:
    """Eqs. 12, 13 and 23 to 25, written out as the paper has them."""
    z, a, b, low, high = gate(log_alpha, temperature), math.exp(log_alpha), temperature, -0.1, 1.1
    complexity = 1 / (1 + math.exp(-(log_alpha - b * math.log(-low / high))))
    assert z.open_probability.item() == pytest.approx(complexity, rel=1e-12)
    for value in (0.01, 0.4, 0.5, 0.99):
        s = (value - low) / (high - low)
        density = (b * a * s ** (-b - 1) * (1 - s) ** (-b - 1)) / (a * s**-b + (1 - s) ** -b) ** 2
        cumulative = 1 / (1 + math.exp(-((math.log(s) - math.log(1 - s)) * b - log_alpha)))
        expected = math.log(density / (high - low))
        assert z.log_prob(number(value)).item() == pytest.approx(expected, abs=1e-10)
        assert z.cdf(number(value)).item() == pytest.approx(cumulative, rel=1e-10)
    estimator = min(1, max(0, 1 / (1 + math.exp(-log_alpha)) * (high - low) + low))
    assert z.readout("paper").item() == pytest.approx(estimator, abs=1e-12)
    noiseless = min(1, max(0, 1 / (1 + math.exp(-log_alpha / b)) * (high - low) + low))
    assert z.readout("median").item() == pytest.approx(noiseless, abs=1e-12)


@pytest.mark.unwatched
@gates
def test_numerical_integration(log_alpha: float, temperature: float) -> None:
    z = gate(log_alpha, temperature)
    masses = z.log_prob(torch.tensor([0.0, 1.0]).double()).exp()
    between = integral(lambda s: z.log_prob(s).exp())
    assert masses.sum().item() + between == pytest.approx(1, abs=1e-11)
    assert z.closed_probability.item() == pytest.approx(masses[0].item(), rel=1e-12)
    mean = masses[1].item() + integral(lambda s: s * z.log_prob(s).exp())
    second = masses[1].item() + integral(lambda s: s * s * z.log_prob(s).exp())
    assert z.mean.item() == pytest.approx(mean, abs=1e-11)
    assert z.readout("mean").item() == z.mean.item()
    assert z.variance.item() == pytest.approx(second - mean**2, abs=1e-11)
    partial = masses[0].item() + integral(lambda s: z.log_prob(s).exp(), 0, 0.3)
    assert z.cdf(number(0.3)).item() == pytest.approx(partial, abs=1e-11)


@pytest.mark.unwatched
def test_a_million_samples() -> None:
    """Every average within 5.5 standard errors: 175 comparisons, so 7 seeds in a million fail."""
    log_alpha, temperature = torch.tensor(SETTINGS).double().T
    z = hc.HardConcrete(log_alpha, temperature)
    samples = z.sample((1_000_000,))
    assert_average(samples, z.mean)
    assert_average((samples - z.mean).square(), z.variance)
    assert_average((samples > 0).double(), z.open_probability)
    for value in (0.0, 0.1, 0.5, 0.999):
        assert_average((samples <= value).double(), z.cdf(number(value)))


def test_rectified_gives_the_same_gate() -> None:
    """The closed forms against Rectified applied to torch's own stretched concrete."""
    log_alpha = torch.linspace(-5, 5, 11).double()
    z = hc.HardConcrete(log_alpha, 0.6)
    general = hc.Rectified(z.base)
    value = torch.tensor([0.0, 0.2, 0.77, 1.0]).double().view(-1, 1)
    torch.testing.assert_close(z.log_prob(value), general.log_prob(value), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(z.cdf(value), general.cdf(value))
    torch.testing.assert_close(z.mean, general.mean)
    torch.testing.assert_close(z.variance, general.variance)
    torch.testing.assert_close(z.icdf(value * 0.98 + 0.01), general.icdf(value * 0.98 + 0.01))
    for rule in general.readouts:
        torch.testing.assert_close(z.readout(rule), general.readout(rule))


def test_figure_2_half_of_the_mass_is_on_the_ends() -> None:
    z = gate(0.0, 0.5)
    ends = z.log_prob(torch.tensor([0.0, 1.0]).double()).exp()
    assert ends[0] == pytest.approx(ends[1].item())
    assert 0.45 < ends.sum() < 0.5


@pytest.mark.parametrize("log_alpha", [-2.0, 0.0, 0.7])
def test_temperature_to_zero_recovers_the_bernoulli(log_alpha: float) -> None:
    """The share of samples between 0 and 1 is below 1.3 T; ten more in 100,000 are allowed, which
    at T = 1e-4 one seed in a thousand would exceed."""
    success = 1 / (1 + math.exp(-log_alpha))
    for temperature in (1e-2, 1e-3, 1e-4):
        z = gate(log_alpha, temperature)
        assert z.open_probability.item() == pytest.approx(success, abs=2 * temperature)
        assert z.mean.item() == pytest.approx(success, abs=2 * temperature)
        assert z.variance.item() == pytest.approx(success * (1 - success), abs=4 * temperature)
        samples = z.sample((100_000,))
        assert ((samples > 0) & (samples < 1)).double().mean() <= 1.3 * temperature + 1e-4


def test_gradients() -> None:
    log_alpha = torch.tensor([-3.0, -0.4, 0.0, 2.5]).double().requires_grad_()
    temperature = torch.tensor(0.7).double().requires_grad_()
    value = torch.tensor([0.0, 0.2, 0.8, 1.0]).double()

    def everything(log_alpha: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = hc.HardConcrete(log_alpha, temperature)
        torch.manual_seed(1)
        return (
            z.open_probability,
            z.closed_probability,
            z.mean,
            z.variance,
            z.log_prob(value),
            z.cdf(value),
            z.icdf(value * 0.9 + 0.05),
            z.rsample((5,)),
            z.readout("paper"),
            z.readout("median"),
        )

    assert gradcheck(everything, (log_alpha, temperature))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_extreme_locations_stay_finite(dtype: torch.dtype, autocast: bool) -> None:
    log_alpha = torch.tensor([-100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0], dtype=dtype)
    log_alpha.requires_grad_()
    temperature = torch.tensor(2 / 3, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        z = hc.HardConcrete(log_alpha, temperature)
        value = torch.tensor([0.0, 0.5, 1.0]).view(-1, 1).to(z.log_alpha.dtype)
        parts = [
            z.rsample((100,)),
            z.open_probability,
            z.closed_probability,
            z.mean,
            z.variance,
            z.stddev,
            z.log_prob(value),
            z.cdf(value),
            *map(z.readout, z.readouts),
        ]
        for part in parts:
            assert part.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert part.isfinite().all()
            if part.requires_grad:
                gradients = torch.autograd.grad(
                    part.sum(), (log_alpha, temperature), retain_graph=True, allow_unused=True
                )
                assert all(g is None or g.isfinite().all() for g in gradients)


@settings(max_examples=60, deadline=None)
@given(
    log_alpha=st.floats(-100, 100),
    temperature=st.floats(0.01, 2),
    low=st.floats(-5, -0.001),
    above=st.floats(0.001, 5),
)
def test_properties_for_any_parameters(log_alpha, temperature, low, above) -> None:
    z = gate(log_alpha, temperature, low=low, high=1 + above)
    assert 0 <= z.open_probability <= 1
    assert (z.open_probability + z.closed_probability).item() == pytest.approx(1)
    assert -1e-12 <= z.mean <= z.open_probability + 1e-12
    assert 0 <= z.variance <= 0.25 + 1e-12
    samples = z.sample((100,))
    assert ((samples >= 0) & (samples <= 1)).all()
    quantiles = torch.linspace(0.01, 0.99, 25).double()
    values = z.icdf(quantiles)
    inside = (values > 1e-3) & (values < 1 - 1e-3)
    torch.testing.assert_close(z.cdf(values)[inside], quantiles[inside], rtol=0, atol=1e-6)
    assert (values.diff() >= 0).all()


def test_icdf_reaches_the_ends() -> None:
    assert gate(0.0).icdf(torch.tensor([0.0, 1.0]).double()).tolist() == [0, 1]


@pytest.mark.early
@pytest.mark.unwatched
def test_compiles_without_a_break() -> None:
    log_alpha = torch.linspace(-2, 2, 7, requires_grad=True)
    temperature = torch.tensor(0.6, requires_grad=True)

    def paths(log_alpha: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = hc.HardConcrete(log_alpha, temperature)
        penalty = (0.1 * z.open_probability).sum()
        return penalty, z.mean, z.variance, z.readout("paper"), z.rsample((50,))

    compiled = torch.compile(paths, fullgraph=True)(log_alpha, temperature)
    eager = paths(log_alpha, temperature)
    for one, other in zip(compiled[:-1], eager[:-1], strict=True):
        torch.testing.assert_close(one, other)
    assert ((compiled[-1] >= 0) & (compiled[-1] <= 1)).all()
    everything = [
        torch.autograd.grad(sum(part.sum() for part in parts[:-1]), (log_alpha, temperature))
        for parts in (compiled, eager)
    ]
    torch.testing.assert_close(*everything)


def test_ten_to_the_six_gates_cost_at_most_three_times_sigmoid_and_uniform() -> None:
    ratio = statistics.median(compare("cpu", rounds=10)["ratio"] for _ in range(3))
    assert ratio <= 3


def test_shapes_broadcast_and_expand() -> None:
    temperature = torch.tensor([[0.5], [0.7]])
    z = hc.HardConcrete(torch.zeros(3), temperature)
    assert z.batch_shape == (2, 3)
    for part in (
        z.sample((4,))[0],
        z.mean,
        z.variance,
        z.readout("paper"),
        z.readout("median"),
        z.open_probability,
        z.log_prob(torch.tensor(0.5)),
        z.cdf(torch.tensor(0.5)),
    ):
        assert part.shape == (2, 3)
    wide = z.expand((5, 2, 3))
    assert wide.sample().shape == (5, 2, 3)
    torch.testing.assert_close(wide.mean, z.mean.expand(5, 2, 3))
    assert hc.HardConcrete(0.0).sample((2,)).shape == (2,)


def test_numbers_follow_tensors() -> None:
    double = torch.tensor([0.5], dtype=torch.float64)
    z = hc.HardConcrete(torch.zeros(3), double)
    assert {z.rsample().dtype, z.mean.dtype, z.readout("paper").dtype} == {torch.float64}
    assert hc.HardConcrete(0.0, double).log_alpha.dtype == torch.float64


def test_the_first_use_may_be_on_the_meta_device() -> None:
    code = "import torch, hardconcrete as hc; torch.set_default_device('meta'); "
    code += "print(hc.HardConcrete(torch.zeros(3), validate_args=False).mean.shape)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_draws_nothing() -> None:
    code = "import torch, hardconcrete as hc; torch.manual_seed(0); before = torch.get_rng_state();"
    code += "hc.HardConcrete; assert torch.equal(torch.get_rng_state(), before)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vmap_over_gates() -> None:
    def both(log_alpha: torch.Tensor) -> torch.Tensor:
        z = hc.HardConcrete(log_alpha, validate_args=False)
        return z.mean + torch.distributions.kl_divergence(z, hc.HardConcrete(0.0))

    log_alpha = torch.linspace(-2, 2, 5)
    torch.testing.assert_close(torch.vmap(both)(log_alpha), both(log_alpha))


def test_a_gate_with_a_given_probability_to_be_open() -> None:
    wanted = torch.tensor([0.1, 0.5, 0.999])
    z = hc.HardConcrete.with_open_probability(wanted, 0.5, low=-0.3)
    torch.testing.assert_close(z.open_probability, wanted)


def test_samples_repeat_with_the_seed() -> None:
    z = hc.HardConcrete(torch.zeros(100))
    torch.manual_seed(3)
    first = z.sample()
    torch.manual_seed(3)
    assert torch.equal(z.sample(), first)


def test_repr_shows_the_parameters() -> None:
    assert repr(gate(0.0, 0.5)) == (
        "HardConcrete(log_alpha: 0.0, temperature: 0.5, low: -0.1, high: 1.1)"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"low": 0.0}, "low < 0 and high > 1"),
        ({"high": 1.0}, "low < 0 and high > 1"),
        ({"low": math.nan}, "low < 0 and high > 1"),
        ({"low": -math.inf}, "must be finite"),
        ({"temperature": 0.0}, "parameter temperature"),
        ({"temperature": torch.tensor([0.5, -1.0])}, "parameter temperature"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hc.HardConcrete(torch.zeros(2), **arguments)


def test_bad_locations_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="parameter log_alpha"):
        hc.HardConcrete(torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match="within the support"):
        gate(0.0).log_prob(number(1.1))
    with pytest.raises(hc.HardConcreteError, match="'paper', 'median', 'mean', 'binary'"):
        gate(0.0).readout("mode")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_cuda_graph_draws_anew_on_each_replay() -> None:
    log_alpha = torch.zeros(1000, device="cuda")

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        z = hc.HardConcrete(log_alpha, validate_args=False)
        return z.rsample(), z.mean

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample, mean = draw()
    graph.replay()
    first = sample.clone()
    graph.replay()
    assert not torch.equal(first, sample)
    torch.testing.assert_close(mean.cpu(), hc.HardConcrete(torch.zeros(1000)).mean)
