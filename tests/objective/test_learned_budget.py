"""Budgets: met by what is delivered, whatever the learning rate, the loss and the network."""

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.cost.ledger import Ledger
from hardconcrete.errors import ArgumentError
from hardconcrete.objective.constraint import BAND
from hardconcrete.objective.learned_budget import GAIN_PER_STEP, WARMUP_STEPS
from tests.compaction.networks import dense

ABOVE = "ignore:the training ended above its budget"


class Wide(nn.Module):
    """Two hidden layers, for a task that needs two directions of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 120), nn.Linear(120, 60), nn.Linear(60, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


def wide() -> hc.GatedModel:
    """A copy of one that is traced once; random numbers go on as after making it."""
    gated, state = _wide()
    torch.set_rng_state(state)
    return copy.deepcopy(gated)


@cache
def _wide() -> tuple[hc.GatedModel, Tensor]:
    torch.manual_seed(0)
    gated = hc.attach_gates(Wide(), torch.zeros(1, 16), droprate=0.5)
    assert gated.ledger is not None
    return gated, torch.get_rng_state()


def task(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 16, generator=generator)
    return x, (x[:, 0] > 0).long() * 2 + (x[:, 1] > x[:, 2]).long()


def train(
    limits: dict[str, object],
    steps: int = 600,
    gate_lr: float = 2e-2,
    scale: float = 1.0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> tuple[hc.GatedModel, hc.Budget]:
    generator = torch.Generator().manual_seed(1)
    gated = wide()
    budget = hc.Budget(gated, **limits, steps=steps, by="gates")  # type: ignore[arg-type]
    rule = optimizer(hc.parameter_groups(gated, lr=3e-3, gate_lr=gate_lr))
    for _ in range(steps):
        x, y = task(64, generator)
        loss = scale * F.cross_entropy(gated(x), y) + budget()
        rule.zero_grad()
        loss.backward()
        rule.step()
        budget.step()
    return gated, budget


@pytest.mark.unwatched
@pytest.mark.parametrize(("limit", "gate_lr"), [(0.5, 1e-2), (0.25, 4e-2), (0.1, 2e-2)])
def test_what_is_delivered_is_what_was_asked_for(limit: float, gate_lr: float) -> None:
    gated, budget = train({"macs": limit}, gate_lr=gate_lr)
    args, kwargs = gated.example
    small = hc.count(hc.compact(gated), args, kwargs).macs / hc.count(Wide(), args, kwargs).macs
    assert small == pytest.approx(budget.delivered()["macs"], rel=1e-6)
    assert 0.95 * limit < small < 1.05 * limit


@pytest.mark.unwatched
def test_a_short_training_gets_there_too() -> None:
    """Prices have to find the scale of the loss in a warm-up of 50 steps."""
    _, budget = train({"macs": 0.25}, steps=150)
    assert budget.delivered()["macs"] == pytest.approx(0.25, rel=0.05)
    gated = wide()
    gains = [
        hc.Budget(gated, macs=0.5, steps=steps, by="gates")._gain for steps in (12_000, 3_000, 30)
    ]
    assert gains == pytest.approx([GAIN_PER_STEP, GAIN_PER_STEP, 10 * GAIN_PER_STEP])


@pytest.mark.unwatched
@pytest.mark.parametrize("scale", [1e-2, 1e2])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    _, budget = train({"macs": 0.25}, scale=scale)
    assert budget.delivered()["macs"] == pytest.approx(0.25, rel=0.05)


@pytest.mark.unwatched
def test_gates_decide_themselves_and_the_task_is_learnt() -> None:
    gated, budget = train({"params": 0.3}, steps=900)
    assert budget.expected()["params"] == pytest.approx(budget.delivered()["params"], rel=0.05)
    x, y = task(2000, torch.Generator().manual_seed(2))
    assert (gated.eval()(x).argmax(1) == y).float().mean() > 0.9


@pytest.mark.unwatched
def test_several_limits_at_once() -> None:
    """The tightest is met; the others are not exceeded."""
    _, budget = train({"macs": 0.5, "params": 0.2, "weight_bytes": 5000})
    delivered, target = budget.delivered(), budget.target()
    assert all(delivered[name] < 1.02 * target[name] for name in target)
    assert any(delivered[name] > 0.95 * target[name] for name in target)


@pytest.mark.unwatched
def test_units_by_group() -> None:
    gated, _ = train({"units": {"a": 30, "b": 0.5}})
    assert gated.units_left() == pytest.approx((30, 30), abs=1)


@pytest.mark.unwatched
def test_units_of_all_groups() -> None:
    gated, _ = train({"units": 90})
    assert sum(gated.units_left()) == pytest.approx(90, abs=3)


def at(limit: float, share: float) -> tuple[hc.GatedModel, hc.Budget]:
    """A budget after its warm-up, with a part of all units open, undecided."""
    gated = wide()
    drawn = torch.rand(180, generator=torch.Generator().manual_seed(0))
    gated.gates.log_alpha.data.copy_(torch.where(drawn < share, -1.0, -4.0))
    budget = hc.Budget(gated, units=limit, steps=3, by="gates")
    budget.step()
    return gated, budget


def slopes(gated: hc.GatedModel, budget: hc.Budget) -> tuple[Tensor, Tensor]:
    """Gradients of open and of shut gates."""
    (slope,) = torch.autograd.grad(budget(), gated.gates.log_alpha)
    is_open = gated.gates.readout() > 0
    return slope[is_open], slope[~is_open]


def test_above_the_limit_every_gate_is_pushed_shut() -> None:
    still_open, shut = slopes(*at(0.25, 0.5))
    assert (still_open > 0).all()
    assert (shut > 0).all()


def test_below_the_band_every_gate_is_pushed_open() -> None:
    still_open, shut = slopes(*at(0.75, 0.5))
    assert (still_open < 0).all()
    assert (shut < 0).all()


def test_within_the_band_gates_go_to_their_sides() -> None:
    _, before = at(0.5, 0.5)
    share = before.delivered()["units"]
    still_open, shut = slopes(*at(share * 1.01, 0.5))
    assert (still_open < 0).all()
    assert (shut > 0).all()


@pytest.mark.parametrize("below", [1.0, 1.01, 1.019, 1.1, 1.5])
def test_satisfied_the_price_restarts(below: float) -> None:
    """However long it was violated: what pushes open gates is set back at once, and not unwound."""
    _, before = at(0.5, 0.5)
    gated, budget = at(0.25, 0.5)
    budget.load_state_dict({**budget.state_dict(), "log_scale": torch.tensor([20.0])})
    assert (slopes(gated, budget)[0] > 1).any()
    assert budget.price()["units"] > 1
    budget.limits.fill_(before.delivered()["units"] * below)
    budget.step()
    assert (slopes(gated, budget)[0] <= 0).all()
    assert budget.price()["units"] <= 0
    budget.limits.fill_(before.delivered()["units"] * 0.9)
    budget.step()
    assert budget.price()["units"] > 1


def change_of_scale(budget: hc.Budget) -> float:
    before = budget.state_dict()["log_scale"]
    budget.step()
    return (budget.state_dict()["log_scale"] - before).item()


def test_the_scale_follows_what_is_delivered() -> None:
    """Up by the gain times the error, for a band at least; unchanged where it is satisfied."""
    assert change_of_scale(at(0.25, 0.5)[1]) > GAIN_PER_STEP * BAND
    _, budget = at(0.5, 0.5)
    budget.limits.fill_(budget.delivered()["units"] / 1.001)
    assert change_of_scale(budget) == pytest.approx(budget._gain * BAND, rel=1e-4)
    for limit in (0.5, 0.75):
        assert change_of_scale(at(limit, 0.4)[1]) == 0


def test_costs_are_asked_for_again_where_a_gate_opens_or_shuts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gated = wide()
    budget = hc.Budget(gated, macs=0.5, steps=30, by="gates")
    asked, cost = [], Ledger.cost
    monkeypatch.setattr(Ledger, "cost", lambda own, gates: asked.append(gates) or cost(own, gates))
    gated.gates.log_alpha.data -= 0.1
    budget.step()
    assert not asked
    gated.gates.log_alpha.data[:9] = -4.0
    budget.step()
    assert len(asked) == 1
    fresh = hc.Budget(gated, macs=0.5, steps=30, by="gates")
    for found, wanted in zip(*(b._costs_in_bands(b._open()) for b in (budget, fresh)), strict=True):
        assert torch.equal(found, wanted)


def test_the_scale_falls_below_the_band_while_the_target_comes_down() -> None:
    gated = wide()
    budget = hc.Budget(gated, units=0.25, steps=3000, by="gates")
    assert change_of_scale(budget) > 0
    gated.gates.log_alpha.data[:90] = -4.0
    assert change_of_scale(budget) < 0


@pytest.mark.parametrize("limit", [2, 9, 25])
def test_a_unit_that_fits_is_asked_back(limit: int) -> None:
    """One less than the limit is open: another is asked back; and then no more."""
    gated = wide()
    nn.init.constant_(gated.gates.log_alpha, -4.0)
    gated.gates.log_alpha.data[: limit - 1] = 4.0
    budget = hc.Budget(gated, units={"a": limit}, steps=3, by="gates")
    budget.step()
    (slope,) = torch.autograd.grad(budget(), gated.gates.log_alpha)
    assert (slope[limit - 1 : 120] < 0).all()
    gated.gates.log_alpha.data[limit - 1] = 4.0
    budget.step()
    (slope,) = torch.autograd.grad(budget(), gated.gates.log_alpha)
    assert (slope[limit:120] > 0).all()


def test_the_last_unit_of_a_group_is_not_pushed() -> None:
    """It stays in any case: shutting it would save nothing."""
    gated = wide()
    nn.init.constant_(gated.gates.log_alpha, 5.0)
    gated.gates.log_alpha.data[121:] = -30.0
    budget = hc.Budget(gated, macs=0.1, steps=3, by="gates")
    budget.step()
    (slope,) = torch.autograd.grad(budget(), gated.gates.log_alpha)
    assert slope[120].abs() < 1e-3 * slope[:120].min()


@pytest.mark.unwatched
def test_the_price_after_units_were_removed() -> None:
    gated, budget = train({"macs": 0.5}, steps=300)
    before = budget.price()
    optimizer = torch.optim.SGD(gated.parameters(), 0.1)
    assert hc.shrink(gated, optimizer, checks=1, below="readout", pays=0.0)
    assert budget.price() == pytest.approx(before, rel=1e-5)


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("part", "fall", "waits"),
    [(0.2, 4.0, True), (0.2, 2.0, False), (0.05, 4.0, False), (1.0, -4.0, False)],
    ids=["some arrive", "too slow", "too few", "rising"],
)
def test_it_waits_for_gates_that_are_falling(part: float, fall: float, waits: bool) -> None:
    """A tenth of the growth, for what falls by so much in a warm-up of 1,000 steps."""
    gated = wide()
    still, moving = (hc.Budget(gated, macs=0.25, steps=3000, by="gates") for _ in range(2))
    moves = int(part * len(gated.gates.log_alpha))
    for _ in range(200):
        gated.gates.log_alpha.data[:moves] -= fall / 1000
        before = [b.state_dict()["log_scale"] for b in (still, moving)]
        still._past.copy_(gated.gates.log_alpha.detach())
        still.step()
        moving.step()
    grown, slowly = (
        (b.state_dict()["log_scale"] - past).item()
        for b, past in zip((still, moving), before, strict=True)
    )
    assert grown > 0
    assert slowly == pytest.approx(grown * (0.1 if waits else 1.0), rel=1e-2)


@pytest.mark.parametrize(("left", "pruned"), [(91, True), (90, False)])
def test_it_rests_below_the_limit_and_not_above(left: int, pruned: bool) -> None:
    """0.2 units too many of 90.8: one has to go, though that is more than what is too much."""
    gated = wide()
    nn.init.constant_(gated.gates.log_alpha, -4.0)
    gated.gates.log_alpha.data[60 : 60 + left] = -1.0
    budget = hc.Budget(gated, units=90.8 / 180, steps=3, by="gates")
    budget.step()
    assert (budget.price()["units"] > 0) == pruned


def test_a_unit_larger_than_the_error_is_not_moved() -> None:
    """2 % too much, of which each unit of the wide layer has 5: only the narrow ones may go."""
    layers = nn.Linear(100, 20), nn.ReLU(), nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 1)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(1, 100))
    nn.init.constant_(gated.gates.log_alpha, 0.0)
    budget = hc.Budget(gated, macs=0.98, steps=3, by="gates")
    for _ in range(3):
        budget.step()
    (slope,) = torch.autograd.grad(budget(), gated.gates.log_alpha)
    assert (slope[:20] < 0).all()
    assert (slope[20:] > 0).all()


def test_the_target_comes_down() -> None:
    gated = wide()
    budget = hc.Budget(gated, macs=0.25, steps=30, by="gates")
    assert budget.warmup == 10
    errors = []
    for _ in range(15):
        errors.append(budget._error(torch.ones(1)).item())
        budget.step()
    assert errors[0] == 0
    assert errors[5] == pytest.approx(-0.5 * torch.tensor(0.25).log().item(), rel=1e-5)
    assert errors[10] == errors[14] == 1  # clipped
    assert hc.Budget(gated, macs=0.25, by="gates").warmup == WARMUP_STEPS


def test_a_resumed_budget_goes_on_as_before() -> None:
    gated, budget = train({"macs": 0.25}, steps=60)
    state = copy.deepcopy(budget.state_dict())
    other = hc.Budget(gated, macs=0.25, steps=60, by="gates")
    other.load_state_dict(state)
    for _ in range(3):
        budget.step()
        other.step()
    grads = [torch.autograd.grad(b(), gated.gates.log_alpha)[0] for b in (budget, other)]
    assert torch.equal(*grads)


def test_a_foreign_state_is_refused() -> None:
    gated = hc.attach_gates(dense(), torch.randn(2, 4))
    state = hc.Budget(gated, macs=0.9, params=0.9, by="gates").state_dict()
    with pytest.raises(ArgumentError, match="not the state of a learned budget"):
        hc.Budget(gated, macs=0.9, by="gates").load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"macs": 0.5, "steps": 60},
            "with other limits or steps; this one has 6 MACs within 20 steps",
        ),
        (
            {"macs": 0.3, "steps": 600},
            "with other limits or steps; this one has 3.6 MACs within 200 steps",
        ),
        (
            {"params": 0.3, "steps": 60},
            "with other limits or steps; this one has 3.6 parameters within 20",
        ),
        ({"units": {":in": 2}, "steps": 60}, "this one has 2 units of :in within 20 steps"),
    ],
)
def test_the_state_of_another_budget_is_refused(other: dict[str, Any], words: str) -> None:
    linear = nn.Linear(4, 3, bias=False)
    gated = hc.attach_gates(linear, torch.zeros(1, 4), sites=[":in"])
    state = hc.Budget(gated, macs=0.3, steps=60, by="gates").state_dict()
    with pytest.raises(ArgumentError, match=words):
        hc.Budget(gated, **other, by="gates").load_state_dict(state)


def test_in_words() -> None:
    gated = wide()
    assert str(hc.Budget(gated, units=0.5, by="gates")).endswith("budget 50.0% of 180")
    assert str(hc.Budget(gated, units={"b": 30}, by="gates")).endswith("budget 50.0% of 60")
    words = str(hc.Budget(gated, macs=0.25, by="gates"))
    assert words.startswith("MACs: 100.0% delivered, ")
    assert words.endswith("% expected, budget 25.0% of 9,360")


@pytest.mark.unwatched
def test_compiled() -> None:
    """One graph each for the loss and the step, with the same numbers."""
    _, budget = train({"macs": 0.25, "units": {"a": 50}}, steps=60)
    loss = torch.compile(budget, fullgraph=True, backend="aot_eager")
    assert loss().item() == budget().item()
    other = copy.deepcopy(budget)
    budget.step()
    torch.compile(other.step, fullgraph=True, backend="aot_eager")()
    assert torch.equal(other._price, budget._price)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed() -> None:
    """The whole step as one CUDA graph meets the budget."""
    torch.manual_seed(0)
    gated = hc.attach_gates(Wide().cuda(), torch.zeros(1, 16, device="cuda"))
    budget = hc.Budget(gated, macs=0.25, steps=600, by="gates")
    groups = hc.parameter_groups(gated, lr=3e-3, gate_lr=2e-2)
    rule = torch.optim.Adam(groups, capturable=True)
    x, y = (part.cuda() for part in task(4096, torch.Generator().manual_seed(1)))

    def step() -> None:
        rule.zero_grad(set_to_none=False)
        (F.cross_entropy(gated(x), y) + budget()).backward()
        rule.step()
        budget.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(600):
        graph.replay()
    assert budget.delivered()["macs"] == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "a budget needs a limit"),
        ({"macs": 1.5}, "macs=1.5: a float is a fraction of the dense total"),
        ({"macs": 0.0}, "above 0 and up to 1"),
        ({"macs": 0}, "macs=0 must lie between 1 and the dense 9,360"),
        ({"macs": 10_000}, "macs=10,000 must lie between 1 and the dense"),
        ({"macs": True}, "must be a fraction such as 0.5, or a whole number"),
        ({"macs": {"a": 0.5}}, "only units can be limited by group: units={name: limit}"),
        ({"macs": float("nan")}, "must be a fraction"),
        ({"macs": 0.001}, "a budget of 0.1% of the MACs cannot be met: 0.224% are not gated"),
        ({"units": {"z": 3}}, "'z' is not a group; the groups are a, b"),
        ({"units": {"a": 0.001}}, "units of a=0.001 is less than one unit of 120"),
        ({"units": 1}, "units=1 are too few: each of 2 groups keeps one"),
        ({"macs": 0.5, "steps": 2}, "steps=2 must be the steps of the training"),
    ],
)
def test_refused(limits: dict[str, object], words: str) -> None:
    gated = wide()
    with pytest.raises(ArgumentError, match=words):
        hc.Budget(gated, **limits, by="gates")  # type: ignore[arg-type]


def test_what_is_not_gated_counts() -> None:
    gated = hc.attach_gates(Wide(), torch.zeros(1, 16), sites=["c:in"])
    with pytest.raises(ArgumentError, match=r"a budget of 10% of the MACs cannot be met: 21.8%"):
        hc.Budget(gated, macs=0.1, by="gates")
    with pytest.raises(ArgumentError, match="Budget takes what attach_gates returned"):
        hc.Budget(Wide(), macs=0.5, by="gates")  # type: ignore[arg-type]


@pytest.mark.filterwarnings(ABOVE)
def test_what_is_not_gated_counts_before_the_gates_too() -> None:
    """With no unit open the layers in front would be dead, and cost nothing: that is no budget."""
    gated = hc.attach_gates(Wide(), torch.zeros(1, 16), sites=["b:out"])
    one = torch.zeros(60)
    one[0] = 1.0
    least = gated.ledger.cost(one)[1] / gated.ledger.dense[1]
    assert 0.2 < least < 0.3
    with pytest.raises(ArgumentError, match="cannot be met"):
        hc.Budget(gated, macs=0.99 * least.item(), by="gates")
    budget = hc.Budget(gated, macs=1.01 * least.item(), by="gates")
    small = hc.compact(gated, budget=budget)
    assert hc.count(small, torch.zeros(1, 16)).macs == least * gated.ledger.dense[1]


@pytest.mark.filterwarnings(ABOVE)
def test_an_emptied_group_keeps_a_unit_that_counts() -> None:
    gated = wide()
    gated.gates.log_alpha.data.fill_(-5.0)
    gated.gates.log_alpha.data[120:] = 5.0
    budget = hc.Budget(gated, units=10, by="gates")
    assert budget.delivered()["units"] == pytest.approx(61 / 180)
    small = hc.compact(gated, budget=budget)
    assert small.a.out_features + small.b.out_features == 10
    assert hc.Budget(gated, units={"a": 3}, by="gates").delivered()["units of a"] == pytest.approx(
        1 / 120
    )


@pytest.mark.filterwarnings(ABOVE)
def test_a_layer_that_selects_its_inputs_can_be_cut_to_one() -> None:
    gated = hc.attach_gates(nn.Linear(20, 5), torch.zeros(1, 20), sites=[":in"])
    small = hc.compact(gated, budget=hc.Budget(gated, macs=0.5, by="gates"))
    assert hc.count(small, torch.zeros(1, 20)).macs == 50
    small = hc.compact(gated, budget=hc.Budget(gated, macs=0.05, by="gates"))
    assert hc.count(small, torch.zeros(1, 20)).macs == 5
    with pytest.raises(ArgumentError, match="5% are not gated, or belong to the one unit"):
        hc.Budget(gated, macs=0.04, by="gates")


def test_a_readout_that_shuts_nothing_is_refused() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(1, 4), sites=[":in"], readout="mean")
    with pytest.raises(ArgumentError, match="the readout 'mean' closes no gate"):
        hc.Budget(gated, macs=0.5, by="gates")


@pytest.mark.parametrize("steps", ["300", 2, 3.5, float("nan")])
def test_a_length_that_is_none(steps: Any) -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(1, 4), sites=[":in"])
    with pytest.raises(ArgumentError, match="must be the steps of the training"):
        hc.Budget(gated, macs=0.5, steps=steps, by="gates")


def test_whole_numbers_of_any_kind() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(1, 4), sites=[":in"])
    assert hc.Budget(gated, macs=np.int64(6), by="gates").target() == {"macs": 0.5}
    assert hc.Budget(gated, macs=np.float32(0.5), by="gates").target() == {"macs": 0.5}


def test_a_state_that_is_none_is_refused() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(1, 4), sites=[":in"])
    with pytest.raises(ArgumentError, match="not the state of a learned budget"):
        hc.Budget(gated, macs=0.5, by="gates").load_state_dict({"start": 3})
