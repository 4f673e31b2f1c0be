"""The values of the gates: drawn, read out, held for one call, and found again in a backward."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.gating.bank import REMEMBERED, GateBank
from tests.distributions.oracles import assert_average
from tests.gating.networks import Segments
from tests.gating.oracles import gradients, next_draw

Call = Callable[[hc.GatedModel, Tensor], Tensor]


def bank(*log_alpha: float, gate: object = hc.HardConcrete, rule: str = "paper") -> GateBank:
    return GateBank(torch.tensor(log_alpha), [len(log_alpha)], gate, rule)


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
    gates = GateBank(torch.linspace(-3, 3, 6), [1, 3, 2], hc.HardConcrete, "paper")
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


# A recomputation in backward sees the gates of its own forward, or is an error.


def call(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x)


def two_calls(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x) + 2 * gated(0.5 * x)


def checkpointed(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return checkpoint(gated, x, use_reentrant=False)


def with_generator(gated: hc.GatedModel, x: Tensor) -> Tensor:
    gated.gates.generator = torch.Generator().manual_seed(5)
    return checkpointed(gated, x)


def results(plan: str, use: Call = call, training: bool = True) -> list[Tensor]:
    """The gradients of gates, weights and input after one backward."""
    torch.manual_seed(1)
    sites = [f"layers.{k}:in" for k in range(len(plan))]
    gated = hc.attach_gates(Segments(plan), torch.zeros(2, 6), sites=sites).train(training)
    x = torch.randn(4, 6, requires_grad=True)
    use(gated, x).square().sum().backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in (*gated.parameters(), x)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert expected[-2].any(), "the gates have a gradient"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["NNN", "-N-", "N-N", "--N"])
@pytest.mark.parametrize(
    "use",
    [
        call,
        two_calls,
        lambda gated, x: gated(x, samples=REMEMBERED),
        lambda gated, x: gated(gated(x).detach()),
    ],
    ids=["once", "two forwards, one backward", "samples", "detached chain"],
)
def test_checkpointing_gives_exact_gradients(plan: str, use: Call) -> None:
    assert_same(results(plan, use), results("---", use))


def test_checkpointing_with_a_draw_in_between() -> None:
    """Calls that are not differentiated do not confuse the one that is."""

    def busy(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = gated(x)
        gated(x)
        with torch.no_grad():
            gated(x)
        return result

    assert_same(results("NNN", busy), results("---", busy))


def test_checkpointing_with_two_backwards() -> None:
    def twice(gated: hc.GatedModel, x: Tensor) -> Tensor:
        result = gated(x)
        result.sum().backward(retain_graph=True)
        return result

    assert_same(results("NNN", twice), results("---", twice))


def test_checkpointing_with_frozen_gates() -> None:
    def frozen(gated: hc.GatedModel, x: Tensor) -> Tensor:
        gated.freeze_gates()
        return gated(x)

    torch.testing.assert_close(results("NNN", frozen), results("---", frozen), rtol=0, atol=0)


def test_checkpointing_in_evaluation() -> None:
    assert_same(results("NNN", training=False), results("---", training=False))


def test_checkpointing_the_whole_gated_model() -> None:
    assert_same(results("---", checkpointed), results("---"))


@pytest.mark.parametrize(
    "use",
    [
        with_generator,
        lambda gated, x: checkpoint(gated, x, use_reentrant=False, preserve_rng_state=False),
    ],
    ids=["generator", "random state not kept"],
)
def test_a_second_draw_in_backward_is_no_other_draw(use: Call) -> None:
    """The recomputed forward draws anew: from the same noise, or that is an error."""

    def plainly(gated: hc.GatedModel, x: Tensor) -> Tensor:
        if use is with_generator:
            gated.gates.generator = torch.Generator().manual_seed(5)
        return gated(x)

    try:
        found = results("---", use)
    except GateError:
        return
    assert_same(found, results("---", plainly))


quiet = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@quiet
@pytest.mark.parametrize("plan", ["RRR", "R--", "--R", "-R-", "NRN"])
def test_reentrant_checkpointing_is_refused(plan: str) -> None:
    """Its gradients of the gates would be lost."""
    with pytest.raises(GateError, match="use_reentrant=False"):
        results(plan)


@quiet
def test_reentrant_checkpointing_in_evaluation() -> None:
    assert_same(results("RRR", training=False), results("---", training=False))


def test_chained_forwards_are_right_or_refused() -> None:
    def chained(gated: hc.GatedModel, x: Tensor) -> Tensor:
        return gated(gated(x))

    expected = results("---", chained)
    try:
        found = results("NNN", chained)
    except GateError:
        return
    assert_same(found, expected)


def test_too_many_forwards_are_refused() -> None:
    with pytest.raises(GateError, match=f"at most {REMEMBERED} forwards per backward"):
        results("NNN", lambda gated, x: gated(x, samples=REMEMBERED + 1))


class Branches(nn.Module):
    """A segment whose last operation does not depend on a gate."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.gated, self.free = nn.Linear(6, 6), nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def segment(self, x: Tensor) -> Tensor:
        return self.gated(x) + torch.tanh(self.free(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.segment, x, use_reentrant=False)
        return self.segment(x)


def test_a_segment_with_branches_is_right_or_refused() -> None:
    def branches(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Branches(checkpointed)
        gated = hc.attach_gates(model, torch.zeros(2, 6), sites=["gated:in"])
        return gradients(gated(torch.randn(4, 6)).square().sum(), gated)

    try:
        found = branches(True)
    except GateError:
        return
    torch.testing.assert_close(found, branches(False), rtol=0, atol=0)


def test_a_draw_belongs_to_its_call_without_checkpointing_too() -> None:
    gated = hc.attach_gates(nn.Linear(6, 2), torch.zeros(2, 6), sites=[":in"])
    x, weight = torch.ones(1, 6), gated.model._parameters["weight"]
    z = next_draw(gated)
    first = gated(x)
    gated(x)
    (slope,) = torch.autograd.grad(first.sum(), weight)
    torch.testing.assert_close(slope, z.expand(2, 6))
