"""The complexity loss against enumeration of all gate patterns, sampling and arithmetic."""

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, Uniform

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError, SiteError
from hardconcrete.sparsifiers import RectifiedGates
from hardconcrete_paper.models import LeNet5
from tests.distributions.oracles import assert_average, divergence
from tests.gating.networks import Temperature
from tests.gating.oracles import gradients, multiplied, spread

COLD = 1e-3
"""At this temperature a hard concrete gate is a Bernoulli variable to three digits."""


def tiny(**settings: object) -> hc.GatedModel:
    """Seven gates: two maps with their biases, and the inputs and single weights of two layers."""
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.uniform_(model[0].bias, 0.5, 1.0)
    sites = ["0:out", "2:in", "3:each"]
    return spread(hc.attach_gates(model, torch.zeros(3, 1, 2), sites=sites, **settings))


def dense(units: int = 4, **settings: object) -> hc.GatedModel:
    return hc.attach_gates(nn.Linear(units, 3), torch.zeros(2, units), sites=[":in"], **settings)


def masked(gated: hc.GatedModel, z: Tensor) -> list[Tensor]:
    """The gated weights under a pattern of gates."""
    weights = dict(gated.model.named_parameters())
    return [
        multiplied(weights[axis.tensor].detach(), axis.dim, z[group.slice])
        for group in gated.groups
        for axis in group.axes
    ]


def patterns(gated: hc.GatedModel) -> list[tuple[float, Tensor]]:
    """Every pattern of open and shut gates with its probability."""
    odds = gated.gates.distribution().open_probability.tolist()
    return [
        (
            math.prod(p if bit else 1 - p for p, bit in zip(odds, bits, strict=True)),
            torch.tensor(bits, dtype=torch.float32),
        )
        for bits in itertools.product((0, 1), repeat=len(odds))
    ]


def expectation(gated: hc.GatedModel, lam: float, decay: float) -> float:
    """E[lam * ||theta||_0 + decay / 2 * ||theta||^2] over all patterns."""
    total = 0.0
    for probability, z in patterns(gated):
        weights = masked(gated, z)
        l0 = sum(int(w.count_nonzero()) for w in weights)
        l2 = sum(w.double().square().sum().item() for w in weights)
        total += probability * (lam * l0 + 0.5 * decay * l2)
    return total


# Values


@pytest.mark.parametrize(("lam", "decay"), [(0.3, 0.0), (0.0, 0.7), (0.3, 0.7)])
def test_all_patterns_of_a_tiny_model(lam: float, decay: float) -> None:
    """Every weight is gated once here, so |g| counts what is left exactly."""
    gated = tiny()
    assert sum(probability for probability, _ in patterns(gated)) == pytest.approx(1)
    found = hc.L0Penalty(gated, lam, weight_decay=decay)()
    assert found.shape == ()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expectation(gated, lam, decay), rel=1e-5)


def test_the_gradient_is_that_of_the_expectation() -> None:
    """By finite differences of the sum over all patterns."""
    gated = tiny()
    slopes = gradients(hc.L0Penalty(gated, 0.3, weight_decay=0.7)(), gated.gates)[0]
    for k, step in itertools.product(range(len(slopes)), [1e-2]):
        ends = []
        for sign in (1, -1):
            gated.gates.log_alpha.data[k] += sign * step
            ends.append(expectation(gated, 0.3, 0.7))
            gated.gates.log_alpha.data[k] -= sign * step
        assert slopes[k].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3)


def test_sampled_gates_agree() -> None:
    """Two averages within 5.5 standard errors: one seed in 13 million fails."""
    gated, lam, decay = tiny(), 0.3, 0.7
    samples = gated.gates.draw((2000,)).detach()
    counts = torch.tensor([sum(w.count_nonzero() for w in masked(gated, z)) for z in samples])
    assert_average(lam * counts.float(), hc.L0Penalty(gated, lam)().detach())
    norms = torch.stack(
        [sum(w.square().sum() for w in masked(gated, (z > 0).float())) for z in samples]
    )
    found = hc.L0Penalty(gated, 0.0, weight_decay=decay)().detach()
    assert_average(0.5 * decay * norms, found)


def test_the_sizes_of_the_papers_networks() -> None:
    """RECIPES section 1: the fan-out of an input, kernel * input maps + bias of a map."""
    mlp = hc.attach_gates(MLP(), torch.zeros(2, 784), sites=["fc1:in", "fc2:in", "fc3:in"])
    sites = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]
    lenet = hc.attach_gates(LeNet5(), torch.zeros(2, 1, 28, 28), sites=sites)
    for gated, sizes in ((mlp, (300, 100, 10)), (lenet, (26, 501, 500, 10))):
        expected = sum(
            size * probability.sum().item()
            for size, probability in zip(sizes, gated.open_probability().values(), strict=True)
        )
        found = hc.L0Penalty(gated, 0.1 / 60_000)().item()
        assert found == pytest.approx(0.1 / 60_000 * expected, rel=1e-5)


@pytest.mark.parametrize("size", [-100.0, 100.0])
def test_it_stays_finite_for_extreme_gates(size: float) -> None:
    gated = tiny()
    nn.init.constant_(gated.gates.log_alpha, size)
    prior = hc.HardConcrete.with_open_probability(0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = hc.L0Penalty(gated, 0.1, weight_decay=0.1, prior=prior, examples=10)()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert all(slope.isfinite().all() for slope in gradients(loss, gated))


def test_closed_gates_cost_nothing() -> None:
    gated = tiny()
    nn.init.constant_(gated.gates.log_alpha, -100.0)
    assert hc.L0Penalty(gated, 0.3, weight_decay=0.7)().item() < 1e-12
    nn.init.constant_(gated.gates.log_alpha, 100.0)
    assert hc.L0Penalty(gated, 1.0)().item() == 2 * 3 + 2 * 2 + 2


def test_it_draws_nothing_and_needs_no_draw() -> None:
    gated = tiny()
    state = torch.get_rng_state()
    hc.L0Penalty(gated, 0.1, weight_decay=0.1)()
    assert torch.equal(torch.get_rng_state(), state)
    values = [hc.L0Penalty(model, 0.1, weight_decay=0.1)() for model in (gated, gated.eval())]
    assert values[0] == values[1]


# The variational bound


def kl_of_patterns(q: list[float], p: float) -> float:
    """KL of Bernoulli gates over all of their joint patterns."""
    total = 0.0
    for bits in itertools.product((0, 1), repeat=len(q)):
        ours = math.prod(a if bit else 1 - a for a, bit in zip(q, bits, strict=True))
        theirs = math.prod(p if bit else 1 - p for bit in bits)
        total += ours * math.log(ours / theirs)
    return total


def test_the_bound_of_all_bernoulli_patterns() -> None:
    gated = tiny(method=RectifiedGates(lambda a: hc.HardConcrete(a, COLD)))
    prior = hc.HardConcrete.with_open_probability(0.1, COLD)
    q = gated.gates.distribution().open_probability.tolist()
    found = hc.L0Penalty(gated, 0.0, prior=prior, examples=50)().item()
    assert found == pytest.approx(kl_of_patterns(q, 0.1) / 50, rel=0.01)


@pytest.mark.parametrize("temperature", [2 / 3, 0.4])
def test_the_bound_adds_the_divergence(temperature: float) -> None:
    """Against the integral of the densities, gate by gate, on top of the other terms."""
    gated = tiny()
    prior = hc.HardConcrete.with_open_probability(0.1, temperature)
    exact = hc.HardConcrete(prior.log_alpha.double(), temperature)
    total = sum(
        divergence(hc.HardConcrete(location, 2 / 3), exact)
        for location in gated.gates.log_alpha.detach().double()
    )
    found = hc.L0Penalty(gated, 0.3, weight_decay=0.7, prior=prior, examples=50)().item()
    assert found == pytest.approx(expectation(gated, 0.3, 0.7) + total / 50, rel=1e-4)


def test_the_bound_agrees_with_samples() -> None:
    """E[log q(z) - log p(z)] within 5.5 standard errors: one seed in 26 million fails."""
    gated = tiny()
    q, prior = gated.gates.distribution(), hc.HardConcrete.with_open_probability(0.3)
    z = q.sample((50_000,))
    ratios = (q.log_prob(z) - prior.log_prob(z)).sum(-1).detach()
    found = hc.L0Penalty(gated, 0.0, prior=prior, examples=20)()
    assert_average(ratios / 20, found.detach())


def test_a_prior_of_another_kind_and_one_per_gate() -> None:
    gated = dense(method=RectifiedGates(lambda a: hc.Rectified(Normal(a, 0.5))), readout="mean")
    same = hc.Rectified(Normal(gated.gates.log_alpha.detach().clone(), 0.5))
    assert hc.L0Penalty(gated, 0.0, prior=same, examples=5)().item() == pytest.approx(0, abs=1e-6)
    wide = hc.Rectified(Normal(torch.tensor(0.0), 2.0))
    assert hc.L0Penalty(gated, 0.0, prior=wide, examples=5)().item() > 0.1


# Lambda


def test_lambda_as_a_number_or_by_group() -> None:
    gated = tiny()
    assert hc.L0Penalty(gated, 0.2).lam == {"0:out": 0.2, "2:in": 0.2, "3:each": 0.2}
    lam = {"2:in": 0.2, "3:each": 0.3, "0:out": 0.1}
    penalty = hc.L0Penalty(gated, lam)
    assert penalty.lam == lam
    found = gated.open_probability()
    sizes = {"0:out": 3, "2:in": 2, "3:each": 1}
    expected = sum(lam[name] * sizes[name] * found[name].sum() for name in lam)
    torch.testing.assert_close(penalty(), expected)


@pytest.mark.parametrize(
    ("lam", "value"), [("aic", 1 / 400), ("bic", math.log(400) / 800), (0, 0.0)]
)
def test_information_criteria(lam: str, value: float) -> None:
    penalty = hc.L0Penalty(dense(), lam, examples=400)
    assert penalty.lam == {":in": pytest.approx(value)}
    expected = value * 3 * penalty.gated.open_probability()[":in"].sum()
    torch.testing.assert_close(penalty(), expected)


def test_a_schedule_follows_its_steps() -> None:
    gated = dense()
    penalty = hc.L0Penalty(gated, lambda step: 0.1 * min(1, step / 2))
    full = 0.1 * 3 * gated.open_probability()[":in"].sum().item()
    found = []
    for _ in range(4):
        found.append(penalty().item())
        penalty.step()
    assert found == pytest.approx([0, full / 2, full, full])
    assert penalty.lam == {":in": pytest.approx(0.1)}


def test_a_schedule_goes_on_where_it_was() -> None:
    gated = dense()

    def lam(step: int) -> dict[str, float]:
        return {":in": 0.1 * step}

    penalty, resumed = hc.L0Penalty(gated, lam), hc.L0Penalty(gated, lam)
    for _ in range(3):
        penalty.step()
    assert penalty.state_dict() == {"steps": 3}
    resumed.load_state_dict(penalty.state_dict())
    assert resumed() == penalty()
    assert resumed().item() > 0
    resumed.step()
    assert resumed.lam == {":in": pytest.approx(0.4)}


def test_a_schedule_is_written_where_a_captured_graph_reads_it() -> None:
    penalty = hc.L0Penalty(dense(), lambda step: 0.1 * step)
    price = penalty.prices
    penalty.step()
    assert penalty.prices is price
    assert torch.equal(price, torch.full((4,), 0.1 * 3))


def test_a_lambda_that_stays_is_not_written_again() -> None:
    penalty = hc.L0Penalty(dense(), lambda step: 0.1 * (step // 2))
    written = []
    for _ in range(4):
        penalty.step()
        written.append((penalty.prices[0].item(), penalty.prices._version))
    prices, versions = zip(*written, strict=True)
    assert prices == pytest.approx([0.0, 0.3, 0.3, 0.6])
    assert versions[0] < versions[1] == versions[2] < versions[3]


# Weight decay


@pytest.mark.parametrize("moves", [True, False])
def test_who_feels_the_decay(moves: bool) -> None:
    gated = tiny()
    l0 = gradients(hc.L0Penalty(gated, 0.3)(), gated.gates)[0]
    penalty = hc.L0Penalty(gated, 0.3, weight_decay=0.7, decay_moves_gates=moves)
    assert penalty().item() == pytest.approx(expectation(gated, 0.3, 0.7), rel=1e-5)
    loss = penalty()
    loss.backward()
    assert torch.equal(gated.gates.log_alpha.grad, l0) is not moves
    open_ = gated.open_probability()
    weight = gated.model[2]._parameters["weight"]
    torch.testing.assert_close(weight.grad, 0.7 * open_["2:in"].detach() * weight.detach())
    bias = gated.model[0]._parameters["bias"]
    torch.testing.assert_close(bias.grad, 0.7 * open_["0:out"].detach() * bias.detach())
    assert gated.model[2].bias.grad is None


def test_a_learnt_temperature_feels_the_penalty() -> None:
    gated = dense(method=RectifiedGates(Temperature()))
    hc.L0Penalty(gated, 0.3)().backward()
    assert gated.gates.gate.raw.grad.abs() > 0


def test_decay_is_done_in_one_place() -> None:
    """The penalty first: the optimiser leaves its weights alone. The other way is refused."""
    gated = tiny()
    penalty = hc.L0Penalty(gated, 0.1, weight_decay=0.5)
    decays = {
        group["name"]: group["weight_decay"]
        for group in hc.parameter_groups(gated, 0.1, weight_decay=0.2)
    }
    assert decays == {"weights": 0.2, "weights decayed by the penalty": 0.0, "gates": 0.0}
    assert penalty.weight_decay == 0.5
    other = tiny()
    hc.parameter_groups(other, 0.1, weight_decay=0.2)
    with pytest.raises(ArgumentError, match=r"parameter_groups\(weight_decay=...\) was called"):
        hc.L0Penalty(other, 0.1, weight_decay=0.5)


def decayed(gated: hc.GatedModel) -> list[str]:
    """The groups that decay in an optimiser."""
    groups = hc.parameter_groups(gated, 0.1, weight_decay=0.2)
    return [group["name"] for group in groups if group["weight_decay"]]


def bare() -> hc.GatedModel:
    layer = nn.Linear(4, 3, bias=False)
    return hc.attach_gates(layer, torch.zeros(2, 4), sites=[":in"])


def test_decay_stays_with_a_penalty_that_is_left() -> None:
    gated = bare()
    penalty = hc.L0Penalty(gated, 0.1, weight_decay=0.5)
    hc.L0Penalty(gated, 0.2, weight_decay=0.5)()
    assert decayed(gated) == []
    assert gated.decayed_by_penalty == {"weight"}
    del penalty
    assert decayed(gated) == ["weights"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_decays_where_its_own_penalty_or_optimizer_does_it(copied: Any) -> None:
    penalty = hc.L0Penalty(bare(), 0.1, weight_decay=0.5)
    assert decayed(copied(penalty.gated)) == ["weights"]
    gated = bare()
    assert decayed(gated) == ["weights"]
    with_own = hc.L0Penalty(copied(gated), 0.1, weight_decay=0.5)
    assert decayed(with_own.gated) == []
    if copied is copy.deepcopy:  # the schedule of a penalty is a function, which has no pickle
        model, objective = copied((with_own.gated, with_own))
        assert objective.gated is model
        assert decayed(model) == []
        del objective
        assert decayed(model) == ["weights"]


# Refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lam": 0.1, "cost": "macs"}, "cost='macs' is not known; use 'group_size'"),
        ({"lam": 0.1, "weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        ({"lam": 0.1, "weight_decay": math.nan}, "weight_decay=nan must"),
        ({"lam": 0.1, "weight_decay": "1"}, "weight_decay='1' must be a number"),
        ({"lam": "aic", "examples": "5"}, "examples='5' must be a whole number"),
        ({"lam": 0.1, "examples": -5}, "examples=-5 must be a whole number, 1 or more"),
        ({"lam": 0.1, "examples": 2.5}, "examples=2.5 must be a whole number"),
        ({"lam": 0.1, "examples": True}, "examples=True must be a whole number"),
        ({"lam": True}, ":in: lam=True must be a number"),
        ({"lam": 0.1, "weight_decay": True}, "weight_decay=True must be a number"),
        ({"lam": -0.1}, ":in: lam=-0.1 must not be negative"),
        ({"lam": math.nan}, ":in: lam=nan must not be negative"),
        ({"lam": math.inf}, ":in: lam=inf must"),
        ({"lam": {":in": -2}}, ":in: lam=-2 must not be negative"),
        ({"lam": lambda step: -1.0 - step}, ":in: lam=-1.0 must not be negative"),
        ({"lam": "AIC"}, "lam='AIC' is not known; use a number, a mapping, 'aic' or 'bic'"),
        ({"lam": None}, "lam=None"),
        ({"lam": "aic"}, "lam='aic' needs examples=N, the number of training examples"),
        ({"lam": "bic", "examples": 0}, "examples=0 must be a whole number"),
        (
            {"lam": 0.1, "prior": hc.HardConcrete(0.0)},
            "a prior needs examples=N: its divergence counts 1/N in a mean loss",
        ),
        ({"lam": 0.1, "prior": hc.HardConcrete(0.0), "examples": 0}, "examples=0 must"),
        ({"lam": 0.1, "prior": hc.HardConcrete(0.0), "examples": -5}, "examples=-5 must"),
        (
            {"lam": 0.1, "prior": Normal(0.0, 1.0), "examples": 9},
            r"such as HardConcrete.with_open_probability\(0.1\), not Normal",
        ),
        (
            {"lam": 0.1, "prior": hc.Rectified(Uniform(0.2, 0.8)), "examples": 9},
            "finite divergence: the support of the gates, and one entry or one per gate .4.; see",
        ),
        (
            {"lam": 0.1, "prior": hc.HardConcrete(torch.zeros(4, 1)), "examples": 9},
            "one entry or one per gate .4.",
        ),
        (
            {"lam": 0.1, "prior": hc.HardConcrete(torch.zeros(3)), "examples": 9},
            "one entry or one per gate .4.",
        ),
    ],
)
def test_refusals(settings: dict[str, object], words: str) -> None:
    gated = dense()
    with pytest.raises(ArgumentError, match=words):
        hc.L0Penalty(gated, **{"weight_decay": 0.1, **settings})
    assert not gated.decayed_by_penalty


def test_lambda_needs_an_entry_for_every_group() -> None:
    gated = tiny()
    with pytest.raises(SiteError, match="lam: '3:each' has no entry; the groups are 0:out, 2:in"):
        hc.L0Penalty(gated, {"0:out": 1, "2:in": 1})
    with pytest.raises(SiteError, match="lam: 'x' is not a group"):
        hc.L0Penalty(gated, {"0:out": 1, "2:in": 1, "3:each": 1, "x": 1})


def test_a_schedule_that_turns_negative_is_refused_when_it_does() -> None:
    penalty = hc.L0Penalty(dense(), lambda step: 1.0 - step)
    penalty.step()
    with pytest.raises(ArgumentError, match=r":in: lam=-1\.0 must not be negative"):
        penalty.step()


class Joined(nn.Module):
    """The last layer reads units, and the inputs beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x).relu(), x], 1))


def test_weights_without_gates_decay_as_well() -> None:
    """Each once, in the penalty or in the optimiser; after a shrink too."""
    gated = hc.attach_gates(Joined(), torch.randn(2, 4))
    gated.gates.log_alpha.data.copy_(torch.tensor([30.0, 30.0, -30.0]))
    penalty = hc.L0Penalty(gated, 0.0, weight_decay=1.0)
    optimizer = torch.optim.SGD(hc.parameter_groups(gated, 0.1, weight_decay=1.0))
    for kept in (7, 6):
        before = gated.model.last._parameters["weight"].detach().clone()
        optimizer.zero_grad()
        penalty().backward()
        optimizer.step()
        factor = gated.model.last._parameters["weight"].detach() / before
        shut = [2] if kept == 7 else []
        expected = torch.tensor([1.0 if k in shut else 0.9 for k in range(kept)])
        torch.testing.assert_close(factor, expected.expand(2, -1))
        assert hc.shrink(gated, optimizer, pays=0.0).done == (kept == 7)


def test_a_call_of_parameter_groups_can_be_taken_back() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    hc.parameter_groups(gated, 0.1, weight_decay=0.1)
    with pytest.raises(ArgumentError, match=r"parameter_groups\(gated, lr\) without a decay"):
        hc.L0Penalty(gated, 0.0, weight_decay=0.1)
    hc.parameter_groups(gated, 0.1)
    penalty = hc.L0Penalty(gated, 0.0, weight_decay=0.1)
    groups = hc.parameter_groups(penalty.gated, 0.1, weight_decay=0.1)
    assert {group["name"]: group["weight_decay"] for group in groups} == {
        "weights": 0.1,  # the bias
        "weights decayed by the penalty": 0.0,
        "gates": 0.0,
    }


def test_numbers_of_numpy_are_numbers_and_others_are_refused() -> None:
    gated = hc.attach_gates(
        nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"], droprate=np.float32(0.5)
    )
    assert hc.L0Penalty(gated, np.float32(0.1)).lam[":in"] == pytest.approx(0.1)
    with pytest.raises(ArgumentError, match=r"lam=tensor\(0.1000\) must be a number"):
        hc.L0Penalty(gated, torch.tensor(0.1))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="takes what attach_gates returned, not a Linear"):
        hc.L0Penalty(nn.Linear(4, 3), 0.1)  # type: ignore[arg-type]
