import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, GateError, HardConcreteWarning
from hardconcrete.objective import ImportanceBudget, LearnedBudget
from hardconcrete.objective.constraint import cheapest_mask
from hardconcrete.sparsifiers import RectifiedGates
from tests.objective import workers
from tests.processes import in_processes

STEPS = 60


def mlp(droprate: float | None = None) -> hc.GatedModel:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2)
    return hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 8), droprate=droprate)


def batch(seed: int) -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2] * x[:, 2:4]).square().mean()


def train(
    gated: hc.GatedModel,
    budget: hc.Budget,
    steps: int = STEPS,
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
) -> None:
    optimizer = optimizer or torch.optim.SGD(gated.parameters(), lr=0.05)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (loss_of(gated, batch(step)) + budget()).backward()
        optimizer.step()
        budget.step()


class Uneven(nn.Module):
    """Of the first layer's units the last three cost less."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 6)
        self.c, self.d = nn.Linear(3, 50), nn.Linear(50, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        out: Tensor = self.b(hidden)[:, :2] + self.d(self.c(hidden[:, :3]).relu())
        return out


def shape_of(gated: hc.GatedModel) -> list[float]:
    return (gated.gates.readout() > 0).tolist()


def test_by_chooses_the_class() -> None:
    assert type(hc.Budget(mlp(), macs=0.5)) is ImportanceBudget
    assert type(hc.Budget(mlp(), macs=0.5, by="importance")) is ImportanceBudget
    assert type(hc.Budget(mlp(), macs=0.5, by="gates")) is LearnedBudget
    with pytest.raises(ArgumentError, match="by='magic' is not known"):
        hc.Budget(mlp(), macs=0.5, by="magic")


def test_the_evaluation_output_stays_until_units_go() -> None:
    gated = mlp()
    before = gated.eval()(batch(0))
    budget = hc.Budget(gated, macs=0.5, steps=STEPS)
    assert torch.equal(gated(batch(0)), before)
    assert torch.equal(gated.train()(batch(0)), before)
    assert budget().item() == 0
    assert budget.phase == "come down"


@pytest.mark.parametrize(
    "limits",
    [
        {"macs": 0.5},
        {"macs": 0.1},
        {"params": 0.3},
        {"weight_bytes": 0.3},
        {"units": 20},
        {"units": {"0": 5, "2": 0.25}},
        {"macs": 0.5, "params": 0.4},
    ],
    ids=str,
)
def test_the_limit_is_met_and_used(limits: dict[str, object]) -> None:
    gated = mlp()
    budget = hc.Budget(gated, steps=STEPS, **limits)  # type: ignore[arg-type]
    train(gated, budget)
    assert isinstance(budget, ImportanceBudget)
    assert budget.settled
    target, delivered = budget.target(), budget.delivered()
    assert all(delivered[name] <= target[name] for name in target)
    assert any(delivered[name] > 0.85 * target[name] for name in target)
    assert delivered == pytest.approx(budget.expected(), rel=1e-6)
    small = hc.compact(gated, budget=budget)
    torch.testing.assert_close(small(batch(7)), gated.eval()(batch(7)))


def test_phases_in_order() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.25, steps=100)
    assert isinstance(budget, ImportanceBudget)
    phases, costs = [], []
    for step in range(100):
        train(gated, budget, 1, first=step)
        phases.append(budget.phase)
        costs.append(budget.delivered()["macs"])
    assert list(dict.fromkeys(phases)) == ["come down", "train what is left"]
    assert phases.index("train what is left") == 39
    assert costs[4] == 1
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 4
    assert "train what is left: the units were fixed at step 40 of 100" in str(budget)


def test_once_settled_training_is_plain_training() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.25, steps=STEPS)
    train(gated, budget, STEPS // 2)
    small = hc.compact(gated).train()
    assert torch.equal(gated.train()(batch(3)), gated(batch(3)))
    torch.testing.assert_close(gated(batch(3)), small(batch(3)))
    before = shape_of(gated)
    train(gated, budget, STEPS // 2, torch.optim.AdamW(gated.parameters(), lr=0.1), STEPS // 2)
    assert shape_of(gated) == before
    assert gated.gates.log_alpha.grad is None


def test_the_gradient_is_that_of_the_gates() -> None:
    """dL/dz is the sum of theta * dL/dtheta over what a gate multiplies."""
    gated = mlp()
    hc.Budget(gated, macs=0.5, steps=STEPS)
    loss_of(gated, batch(0)).backward()
    expected = torch.cat(
        [
            (layer._parameters["weight"] * layer._parameters["weight"].grad).sum(0)
            for layer in (gated.model[2], gated.model[4])
        ]
    )
    torch.testing.assert_close(gated.gates.log_alpha.grad, expected.detach())


def test_units_that_nothing_needs_go_first() -> None:
    gated = mlp()
    useless = torch.arange(0, 32, 2)
    with torch.no_grad():
        dict(gated.model.named_parameters())["2.weight"][:, useless] = 0.0
    budget = hc.Budget(gated, units={"0": 16}, steps=STEPS)
    train(gated, budget, optimizer=torch.optim.SGD(gated.parameters(), lr=0.0))
    assert not gated.gate_values()["0"][useless].any()
    assert gated.units_left() == (16, 16)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_no_optimizer_moves_the_gates(kind: type[torch.optim.Optimizer]) -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.5, steps=STEPS)
    train(gated, budget, 10, kind(gated.parameters(), lr=1.0, weight_decay=0.5))  # type: ignore[call-arg]
    assert set(gated.gates.log_alpha.abs().tolist()) == {20.0}


def test_gates_may_be_left_out_of_the_optimizer() -> None:
    """Then nobody clears their gradient, which must not add up."""
    with_gates, without = mlp(), mlp()
    for gated, parameters in (
        (with_gates, with_gates.parameters()),
        (without, without.model.parameters()),
    ):
        budget = hc.Budget(gated, macs=0.3, steps=STEPS)
        train(gated, budget, optimizer=torch.optim.SGD(parameters, lr=0.05))
    assert shape_of(with_gates) == shape_of(without)


def test_a_resumed_run_ends_the_same() -> None:
    whole, steps = mlp(), STEPS
    budget = hc.Budget(whole, macs=0.3, params=0.4, steps=steps)
    train(whole, budget, 12)
    state, weights = budget.state_dict(), copy.deepcopy(whole.state_dict())
    train(whole, budget, steps - 12, first=12)
    again = mlp()
    other = hc.Budget(again, macs=0.3, params=0.4, steps=steps)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    train(again, other, steps - 12, first=12)
    assert shape_of(again) == shape_of(whole)
    last = hc.Budget(mlp(), macs=0.3, params=0.4, steps=steps)
    last.gated.load_state_dict(again.state_dict())
    last.load_state_dict(other.state_dict())
    assert isinstance(last, ImportanceBudget)
    assert last.settled
    assert last.gated.gates.frozen


def test_units_are_taken_out_while_it_trains() -> None:
    gated, whole = mlp(), mlp()
    budget, reference = (hc.Budget(each, macs=0.2, steps=STEPS) for each in (gated, whole))
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (gated, whole)
    ]
    for start in range(0, STEPS, 10):
        train(gated, budget, 10, optimizers[0], start)
        train(whole, reference, 10, optimizers[1], start)
        hc.shrink(gated, optimizers[0], pays=0.05)
    assert gated.model[0].out_features < 32
    assert gated.units_left() == whole.units_left()
    torch.testing.assert_close(gated.eval()(batch(9)), whole.eval()(batch(9)))
    assert budget.delivered() == pytest.approx(reference.delivered())
    assert len(gated.gates.log_alpha) == len(budget.importance())  # type: ignore[attr-defined]


def test_widths_in_multiples() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.5, steps=STEPS, round_to=8)
    train(gated, budget)
    assert all(units % 8 == 0 and units for units in gated.units_left())
    with pytest.raises(ArgumentError, match="round_to and measure_every are for a budget"):
        hc.Budget(mlp(), macs=0.5, by="gates", round_to=8)
    with pytest.raises(ArgumentError, match="round_to=0 must be"):
        hc.Budget(mlp(), macs=0.5, round_to=0)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ArgumentError, match="steps=5 is too short"):
        hc.Budget(mlp(), macs=0.5, steps=5)
    with pytest.raises(ArgumentError, match="cannot be met"):
        hc.Budget(mlp(), macs=0.001, steps=STEPS)
    budget = hc.Budget(mlp(), macs=0.5, steps=STEPS)
    with pytest.raises(GateError, match="needs the gradients of this step"):
        budget.step()
    with pytest.raises(ArgumentError, match=re.escape("with other limits or steps; this one has")):
        hc.Budget(mlp(), macs=0.5, steps=STEPS + 1).load_state_dict(budget.state_dict())
    with pytest.raises(ArgumentError, match="not the state of a budget by importance"):
        budget.load_state_dict({})


def test_gates_that_are_never_one_are_refused_and_left() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

    def never_one(log_alpha: Tensor) -> hc.Rectified:
        return hc.Rectified(torch.distributions.Normal(log_alpha.sigmoid() / 2, 1.0))

    gated = hc.attach_gates(
        model, torch.zeros(2, 8), method=RectifiedGates(never_one), readout="median"
    )
    before = gated.gates.log_alpha.detach().clone()
    with pytest.raises(ArgumentError, match="needs gates that are 0 or 1"):
        hc.Budget(gated, macs=0.5, steps=STEPS)
    assert torch.equal(gated.gates.log_alpha.detach(), before)
    assert not gated.gates.measured


def test_check_run_knows_its_length() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.5, steps=100)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05)
    with pytest.warns(HardConcreteWarning, match=re.escape("hc.Budget(..., steps=40)")):
        hc.check_run(budget, optimizer, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hc.check_run(budget, optimizer, 100) == ()


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_activation_checkpointing_measures_the_same() -> None:
    plain = mlp()
    again = hc.attach_gates(Checkpointed(hc.remove_gates(mlp())), torch.zeros(2, 8))
    for gated in (plain, again):
        hc.Budget(gated, macs=0.5, steps=STEPS)
        loss_of(gated, batch(0)).backward()
    torch.testing.assert_close(plain.gates.log_alpha.grad, again.gates.log_alpha.grad)


@pytest.mark.early
def test_compiled_training_measures_the_same() -> None:
    plain, other = mlp(), mlp()
    budgets = [hc.Budget(each, macs=0.3, steps=STEPS) for each in (plain, other)]
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for step in range(STEPS):
        for gated, model, budget in ((plain, plain, budgets[0]), (other, compiled, budgets[1])):
            gated.zero_grad()
            loss_of(model, batch(step)).backward()  # type: ignore[arg-type]
            budget.step()
    assert shape_of(plain) == shape_of(other)
    torch.testing.assert_close(compiled(batch(0)), plain(batch(0)))


@pytest.mark.early
def test_processes_that_share_a_model_choose_the_same_units(tmp_path: Path) -> None:
    """Each sees other data; training goes on after the units are fixed."""
    in_processes(2, workers.distributed_budget, tmp_path)
    (first, delivered), (second, _) = (torch.load(tmp_path / f"rank{k}.pt") for k in range(2))
    assert torch.equal(first, second)
    assert set(first.tolist()) == {0.0, 1.0}
    assert delivered["macs"] <= 0.5


def test_a_long_training_measures_every_fourth_step() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.5, steps=1000)
    measured = []
    for step in range(9):
        measured.append(gated.gates.measuring)
        train(gated, budget, 1, first=step)
    assert measured == [True, False, False, False] * 2 + [True]
    often, seldom = (hc.Budget(mlp(), macs=0.5, steps=STEPS, measure_every=n) for n in (1, 3))
    for each in (often, seldom):
        train(each.gated, each, optimizer=torch.optim.SGD(each.gated.parameters(), lr=0.0))
        assert each.delivered()["macs"] <= 0.5
    assert not often.gated.gates.measuring


def test_a_loss_that_the_gates_do_not_reach_is_refused() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.5, steps=20)

    def train_on_nothing() -> None:
        for _ in range(20):
            gated.zero_grad()
            (0 * gated(batch(0)).sum() + budget()).backward()
            budget.step()

    with pytest.raises(GateError, match="no gradient of the gates was measured"):
        train_on_nothing()


def test_a_step_without_finite_gradients_is_not_measured() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.4, steps=STEPS)
    assert isinstance(budget, ImportanceBudget)
    train(gated, budget, 2)
    before = budget.importance()
    for bad in (torch.nan, torch.inf):
        (bad * loss_of(gated, batch(0)) + budget()).backward()
        budget.step()  # and the optimizer's step is skipped, as GradScaler does
        assert torch.equal(budget.importance(), before)
    train(gated, budget, STEPS - 4, first=4)
    assert budget.settled


def test_no_learning_rate_opens_or_shuts_a_gate() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.4, steps=STEPS)
    rates = [(gated.model, 0.0), (gated.gates, 1e6)]
    optimizer = torch.optim.SGD([{"params": [*m.parameters()], "lr": lr} for m, lr in rates])
    train(gated, budget, 3, optimizer)
    assert gated.units_left() == (32, 16)


def test_a_limit_of_the_cheapest_model_is_met_exactly() -> None:
    gated = mlp()
    least = int(gated.ledger.cost(cheapest_mask(gated))[1])
    budget = hc.Budget(gated, macs=least, steps=STEPS)
    train(gated, budget)
    assert gated.delivered("macs") == least
    assert gated.units_left() == (1, 1)


def test_units_that_cost_most_can_be_all_that_would_stay() -> None:
    """Then the cheapest unit of a group stays, not the most important one."""
    gated = hc.attach_gates(Uneven(), torch.zeros(2, 8))
    least = int(gated.ledger.cost(cheapest_mask(gated))[1])
    budget = hc.Budget(gated, macs=least, steps=STEPS)
    train(gated, budget)
    assert gated.delivered("macs") == least


def test_one_budget_after_the_other() -> None:
    gated = mlp()
    first = hc.Budget(gated, macs=0.6, steps=STEPS)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05)
    train(gated, first, optimizer=optimizer)
    assert hc.shrink(gated, optimizer)
    second = hc.Budget(gated, macs=0.3, steps=STEPS)
    assert isinstance(second, ImportanceBudget)
    train(gated, second, 20, optimizer)
    before = gated.by_group(second.importance())
    left = {name: values > 0 for name, values in gated.gate_values().items()}
    assert hc.shrink(gated, optimizer, pays=0.0)
    for name, values in gated.by_group(second.importance()).items():
        assert torch.equal(values, before[name][left[name]])
    train(gated, second, STEPS - 20, optimizer, first=20)
    assert 0.25 < second.delivered()["macs"] <= 0.3 + 1e-6
    with pytest.raises(GateError, match="another budget by importance was built"):
        first.step()


def test_nothing_that_learns_gates_works_beside_it() -> None:
    gated = mlp()
    penalty = hc.L0Penalty(gated, lam=0.1)
    learned = hc.Budget(gated, macs=0.5, by="gates")
    hc.Budget(gated, macs=0.5)
    for beside in (penalty, learned, lambda: hc.Budget(gated, macs=0.5, by="gates")):
        with pytest.raises(GateError, match="a budget by importance was built for this model"):
            beside()


def test_learned_gates_stay_until_the_first_step() -> None:
    """A budget that is built for ``compact`` alone changes nothing."""
    gated = mlp(droprate=0.5).eval()
    before, locations = gated(batch(0)), gated.gates.log_alpha.detach().clone()
    budget = hc.Budget(gated, macs=0.9)
    assert torch.equal(gated(batch(0)), before)
    assert torch.equal(gated.gates.log_alpha, locations)
    ones = torch.ones_like(locations)
    with gated.gates.holding(None, ones):
        expected = gated(batch(0))
    assert torch.equal(gated.train()(batch(0)), expected)
    train(gated, budget, 1)
    assert gated.gates.log_alpha.tolist() == [20.0] * 48


def test_frozen_weights_do_not_freeze_the_gates() -> None:
    gated = mlp()
    gated.requires_grad_(False)
    gated.model[4].requires_grad_(True)
    budget = hc.Budget(gated, macs=0.4, steps=STEPS)
    train(gated, budget, 4)
    gated.gates.requires_grad_(False)
    with pytest.raises(GateError, match=r"freeze gated\.model instead of gated"):
        train(gated, budget, 1)


def test_states_load_in_either_order() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.4, steps=STEPS)
    train(gated, budget, 12)
    again = mlp()
    other = hc.Budget(again, macs=0.4, steps=STEPS)
    other.load_state_dict(budget.state_dict())
    again.load_state_dict(gated.state_dict())
    for each, own in ((gated, budget), (again, other)):
        train(each, own, STEPS - 12, first=12)
    assert sum(shape_of(gated)) < 48
    assert shape_of(again) == shape_of(gated)
    assert torch.equal(again(batch(0)), gated(batch(0)))


def test_evaluation_mode_is_named() -> None:
    gated = mlp().eval()
    with pytest.raises(GateError, match="called in evaluation mode"):
        train(gated, hc.Budget(gated, macs=0.4, steps=STEPS))


def test_the_model_may_move_to_another_device() -> None:
    gated = mlp()
    budget = hc.Budget(gated, macs=0.4, steps=STEPS)
    train(gated, budget, 1)
    gated.to("meta")
    loss_of(gated, batch(1).to("meta")).backward()
    budget.step()
    assert budget.importance().is_meta  # type: ignore[attr-defined]
