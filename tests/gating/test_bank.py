import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating.bank import GateBank
from hardconcrete.sparsifiers import RectifiedGates
from tests.distributions.oracles import assert_average

Call = Callable[[hc.GatedModel, Tensor], Tensor]


def bank(*log_alpha: float, gate: object = hc.HardConcrete, rule: str = "paper") -> GateBank:
    return GateBank(
        {"log_alpha": torch.tensor(log_alpha)}, [len(log_alpha)], RectifiedGates(gate), rule
    )


def test_draws_follow_the_distribution() -> None:
    """Nine averages within 5.5 standard errors: one seed in 3 million fails."""
    gates = bank(-2.0, 0.0, 2.0)
    samples = gates.draw((100_000,)).detach()
    law = gates.distribution()
    assert_average(samples, law.mean.detach())
    assert_average((samples > 0).float(), law.open_probability.detach())
    assert_average((samples - law.mean).square().detach(), law.variance.detach())


def test_a_draw_has_a_gradient_and_the_readout_too() -> None:
    gates = bank(-1.0, 0.0, 1.0)
    for values in (gates.draw(), gates.readout()):
        (slope,) = torch.autograd.grad(values.sum(), gates.log_alpha)
        assert slope.isfinite().all()
        assert slope.any()


def test_a_generator_of_its_own() -> None:
    gates = bank(*[0.0] * 50)
    gates.generator = torch.Generator().manual_seed(3)
    state = torch.get_rng_state()
    first = gates.draw()
    assert torch.equal(torch.get_rng_state(), state)
    gates.generator.manual_seed(3)
    assert torch.equal(gates.draw(), first)
    assert not torch.equal(gates.draw(), first)


@pytest.mark.parametrize("rule", ["paper", "median", "mean", "binary"])
def test_the_readout_is_the_rule_that_was_asked_for(rule: str) -> None:
    gates = bank(-3.0, -0.5, 0.5, 3.0, rule=rule)
    assert torch.equal(gates.readout(), hc.HardConcrete(gates.log_alpha).readout(rule))


def test_reading_the_gates_draws_nothing() -> None:
    """Also for a rectified Normal, whose moments are integrals."""
    for gates in (
        bank(0.0, 1.0),
        bank(0.0, 1.0, gate=lambda a: hc.Rectified(Normal(a, 1.0)), rule="mean"),
    ):
        state = torch.get_rng_state()
        gates.readout()
        assert gates.distribution().open_probability.isfinite().all()
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [-100.0, 100.0])
def test_extreme_locations_stay_finite(size: float) -> None:
    gates = bank(size, size)
    total = gates.draw().sum() + gates.readout().sum() + gates.distribution().mean.sum()
    total.backward()
    assert gates.log_alpha.grad.isfinite().all()


def test_values_are_held_for_the_time_of_a_call() -> None:
    gates, drawn, read = bank(0.0), torch.tensor([0.25]), torch.tensor([0.75])
    assert not gates.held
    with gates.holding(drawn, None):
        assert gates.held
        assert gates.values(training=True) == (drawn,)
        with gates.holding(None, read):
            assert gates.values(training=False) == (read,)
        assert gates.values(training=True) == (drawn,)
        assert gates.values(training=False) == (gates.readout(),)
    assert not gates.held


def test_values_are_taken_apart_by_group() -> None:
    gates = GateBank({"log_alpha": torch.linspace(-3, 3, 6)}, [1, 3, 2], RectifiedGates(), "paper")
    parts = gates.values(training=False)
    assert [len(part) for part in parts] == [1, 3, 2]
    assert torch.equal(torch.cat(parts), gates.readout())
    with gates.holding(gates.draw((5,)), None):
        assert [part.shape for part in gates.values(training=True)] == [(5, 1), (5, 3), (5, 2)]


def test_an_error_inside_a_call_ends_it() -> None:
    gates = bank(0.0)
    with pytest.raises(ZeroDivisionError), gates.holding(gates.draw(), None):
        raise ZeroDivisionError
    assert not gates.held


def test_without_a_draw_training_has_no_values() -> None:
    gates = bank(0.0)
    with pytest.raises(GateError, match="put other methods inside `with"):
        gates.values(training=True)
    assert gates.values(training=False) == (gates.readout(),)


def test_copies_hold_nothing() -> None:
    gates = bank(0.0, 1.0)
    gates.generator = torch.Generator()
    with gates.holding(gates.draw(), gates.readout()):
        other = copy.deepcopy(gates)
        assert list(gates.state_dict()) == ["log_alpha"]
        assert gates.held
    assert not other.held
    assert other.generator is None
    assert torch.equal(other.log_alpha, gates.log_alpha)
    assert other.log_alpha is not gates.log_alpha


@pytest.mark.parametrize(
    ("gate", "rule", "words"),
    [
        (lambda a: a.sigmoid(), "paper", "must turn log_alpha into a Rectified, and gave Tensor"),
        (lambda a: Normal(a, 1.0), "paper", "and gave Normal"),
        (lambda a: hc.HardConcrete(a[:1]), "paper", r"shape of log_alpha, \[2\], and gave \[1\]"),
        (lambda a: hc.HardConcrete(a.sum()), "paper", r"shape of log_alpha, \[2\], and gave \[\]"),
        (hc.HardConcrete, "mode", "readout 'mode' is not known to HardConcrete; use one of"),
        (lambda a: hc.Rectified(Normal(a, 1.0)), "paper", "'paper' is not known to Rectified"),
    ],
)
def test_unusable_gates_are_refused(gate: object, rule: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bank(0.0, 1.0, gate=gate, rule=rule)


def test_the_checks_of_torch_distributions_are_left_as_they_were() -> None:
    gates = bank(0.0)
    gates.distribution()
    assert torch.distributions.Distribution._validate_args
