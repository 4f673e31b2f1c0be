"""Warnings where a run cannot prune or has gone wrong, and none where all is well."""

import bisect
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError, HardConcreteWarning
from hardconcrete.objective.diagnostics import Reach
from hardconcrete_paper.models import LeNet5


class WideLayers(nn.Module):
    """First convolutions of WRN-28-10's blocks: one of each size that gates have there."""

    def __init__(self) -> None:
        super().__init__()
        inputs = (16, 160, 320, 640)
        self.convs = nn.ModuleList(nn.Conv2d(n, 160, 3, bias=False) for n in inputs)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [conv(x[:, : conv.in_channels]) for conv in self.convs]


def of_the_paper(lam: float = 0.001 / 50_000, **settings: object) -> hc.L0Penalty:
    sites = [f"convs.{k}:out" for k in range(4)]
    images = torch.zeros(1, 640, 3, 3)
    gated = hc.attach_gates(WideLayers(), images, sites=sites, droprate=0.3)
    return hc.L0Penalty(gated, lam, **settings)


def drops(step: int) -> float:
    return 0.2 ** bisect.bisect_right([60, 120, 160], step // 391)


def run_of_the_paper(penalty: hc.L0Penalty, rate: float = 0.1) -> tuple[Reach, ...]:
    groups = hc.parameter_groups(penalty.gated, lr=0.1, gate_lr=rate)
    return hc.check_run(penalty, SGD(groups, momentum=0.9, nesterov=True), 200 * 391, drops)


@pytest.mark.unwatched
def test_the_papers_wide_network_cannot_prune_as_published() -> None:
    """RECIPES: log_alpha goes from 0.85 to about 0.78 (160 maps) or 0.6 (640)."""
    with pytest.warns(hc.HardConcreteWarning, match="cannot prune 4 of 4 groups") as caught:
        reaches = run_of_the_paper(of_the_paper())
    assert [reach.start for reach in reaches] == pytest.approx([0.85] * 4, abs=0.01)
    ends = [reach.end for reach in reaches]
    assert ends[1:] == pytest.approx([0.784, 0.72, 0.575], abs=0.01)
    assert [reach.shut for reach in reaches] == [0] * 4
    words = str(caught[0].message)
    assert "log_alpha of convs.0:out from 0.85 to 0.84, and a gate is closed below -2.40" in words
    assert "78,200 steps of SGD" in words


@pytest.mark.unwatched
def test_the_norms_of_the_weights_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay as they are, however many trials it takes to find a cure."""
    penalty, taken = of_the_paper(weight_decay=5e-4), []
    norms = hc.L0Penalty.squared_norms
    monkeypatch.setattr(
        hc.L0Penalty, "squared_norms", lambda self: taken.append(self) or norms(self)
    )
    with pytest.warns(hc.HardConcreteWarning, match="a lambda 210 times as large"):
        run_of_the_paper(penalty)
    assert taken == [penalty]


def numbers(words: str) -> tuple[float, float]:
    """The factor on lambda and the learning rate of the gates that a warning proposes."""
    lam = words.partition("a lambda ")[2].partition(" times")[0].replace(",", "")
    return float(lam), float(words.partition("a learning rate of ")[2].partition(" ")[0])


@pytest.mark.unwatched
def test_the_numbers_proposed_do() -> None:
    """And somewhat smaller ones do not."""
    with pytest.warns(hc.HardConcreteWarning) as caught:
        run_of_the_paper(of_the_paper())
    lam, rate = numbers(str(caught[0].message))
    run_of_the_paper(of_the_paper(lam * 0.001 / 50_000))
    run_of_the_paper(of_the_paper(), rate=1.03 * rate)
    for penalty, smaller in (
        (of_the_paper(0.9 * lam * 0.001 / 50_000), 0.1),
        (of_the_paper(), 0.9 * rate),
    ):
        with pytest.warns(hc.HardConcreteWarning, match="1 of 4 groups"):
            run_of_the_paper(penalty, smaller)


@pytest.mark.parametrize("network", ["mlp", "lenet5"])
def test_the_networks_of_table_1_can_prune(network: str) -> None:
    """Adam 1e-3, 120,000 steps: no warning, which would be an error here."""
    if network == "mlp":
        sites = ["fc1:in", "fc2:in", "fc3:in"]
        gated = hc.attach_gates(MLP(), torch.zeros(2, 784), sites=sites)
    else:
        sites = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]
        gated = hc.attach_gates(LeNet5(), torch.zeros(2, 1, 28, 28), sites=sites)
    penalty = hc.L0Penalty(gated, 0.1 / 60_000)
    reaches = hc.check_run(penalty, Adam(hc.parameter_groups(gated, lr=1e-3)), 120_000)
    assert [reach.shut for reach in reaches] == [group.units for group in gated.groups]


def dense(**settings: object) -> hc.GatedModel:
    return hc.attach_gates(nn.Linear(100, 3), torch.zeros(2, 100), sites=[":in"], **settings)


def test_for_adam_lambda_is_not_what_to_change() -> None:
    gated = dense()
    optimizer = Adam(hc.parameter_groups(gated, lr=1e-3))
    with pytest.warns(hc.HardConcreteWarning, match="cannot prune :in") as caught:
        hc.check_run(hc.L0Penalty(gated, 0.1), optimizer, 1000)
    words = str(caught[0].message)
    assert "lambda" not in words
    assert "a learning rate of 0.0021" in words
    assert "2.2 times the steps" in words
    hc.check_run(hc.L0Penalty(gated, 0.1), optimizer, 2200)


def test_weight_decay_of_gates_is_named() -> None:
    gated = dense()
    optimizer = Adam(gated.parameters(), lr=1e-2, weight_decay=0.1)
    with pytest.warns(hc.HardConcreteWarning, match="weight decay pulls gates open"):
        hc.check_run(hc.L0Penalty(gated, 1e-4), optimizer, 100_000)


def test_no_lambda_is_no_pruning() -> None:
    """But one that would do is named, and does."""
    gated = dense()
    optimizer = SGD(hc.parameter_groups(gated, lr=0.1))
    with pytest.warns(hc.HardConcreteWarning, match="a lambda of .*, which is 0 now") as caught:
        hc.check_run(hc.L0Penalty(gated, 0.0), optimizer, 1000)
    lam = float(str(caught[0].message).split("a lambda of ")[1].split(",")[0])
    assert not hc.check_run(hc.L0Penalty(gated, lam), optimizer, 1000)[0].stuck
    with pytest.warns(hc.HardConcreteWarning, match="a learning rate of"):
        hc.check_run(hc.L0Penalty(gated, 0.9 * lam), optimizer, 1000)


@pytest.mark.unwatched
def test_the_smallest_lambda_gets_a_number() -> None:
    gated = dense()
    optimizer = SGD(hc.parameter_groups(gated, lr=0.1))
    with pytest.warns(hc.HardConcreteWarning, match=r"a lambda [1-9]\d?,000,000 times as large"):
        hc.check_run(hc.L0Penalty(gated, 1e-9), optimizer, 1000)


@pytest.mark.unwatched
def test_gates_that_are_shut_already_are_no_success() -> None:
    gated = dense()
    gated.gates.log_alpha.data[0] = -5.0
    slow = Adam(hc.parameter_groups(gated, lr=5e-4))
    for penalty in (hc.L0Penalty(gated, 0.1), hc.Budget(gated, macs=0.5, steps=1000, by="gates")):
        with pytest.warns(hc.HardConcreteWarning, match="this run cannot"):
            (reach,) = hc.check_run(penalty, slow, 1000)
        assert reach.already == reach.shut == 1
        assert reach.stuck
    gated.gates.log_alpha.data.fill_(-5.0)
    assert not hc.check_run(hc.L0Penalty(gated, 0.1), slow, 1000)[0].stuck


def test_a_budget_that_is_met_already() -> None:
    gated = dense()
    slow = Adam(hc.parameter_groups(gated, lr=1e-6))
    assert hc.check_run(hc.Budget(gated, macs=1.0, by="gates"), slow, 100)[0].shut == 0


@pytest.mark.unwatched
def test_a_budget_under_sgd_is_followed() -> None:
    """Its price grows, but not fast enough in so few steps; all is as before afterwards."""
    layers = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 16), droprate=0.5)
    budget = hc.Budget(gated, macs=0.25, steps=300, by="gates")
    gates, state = gated.gates.log_alpha.detach().clone(), budget.state_dict()
    slow = SGD(hc.parameter_groups(gated, lr=1e-2, gate_lr=1e-5))
    with pytest.warns(hc.HardConcreteWarning, match="a separate Adam and a learning rate"):
        hc.check_run(budget, slow, 300)
    hc.check_run(budget, slow, 10_000)
    assert torch.equal(gates, gated.gates.log_alpha)
    assert all(torch.equal(value, budget.state_dict()[name]) for name, value in state.items())


def test_a_readout_that_never_shuts() -> None:
    gated = dense(readout="mean")
    optimizer = Adam(hc.parameter_groups(gated, lr=1e-2))
    with pytest.warns(hc.HardConcreteWarning, match="readout 'mean' closes no gate"):
        (reach,) = hc.check_run(hc.L0Penalty(gated, 0.1), optimizer, 10_000)
    assert reach.shut == 0


@pytest.mark.parametrize(("rule", "edge"), [("paper", 1.0), ("median", 2 / 3), ("binary", 2 / 3)])
def test_where_the_readouts_shut_a_gate(rule: str, edge: float) -> None:
    """Sigmoid(log_alpha), or of log_alpha / beta, at 1/12; P(open) = 1/2 at beta log(1/11)."""
    gated = dense(readout=rule)
    optimizer = Adam(hc.parameter_groups(gated, lr=1e-2))
    (reach,) = hc.check_run(hc.L0Penalty(gated, 0.1), optimizer, 10_000)
    assert reach.shut_below == pytest.approx(edge * math.log(1 / 11), abs=1e-3)
    assert reach.shut == 100


def test_gates_that_nothing_moves() -> None:
    gated = dense()
    penalty = hc.L0Penalty(gated, 0.1)
    with pytest.warns(hc.HardConcreteWarning, match="the SGD does not have the gates"):
        assert hc.check_run(penalty, SGD(gated.model.parameters(), lr=1.0), 10) == ()
    with pytest.warns(hc.HardConcreteWarning, match="how far LBFGS moves gates is not known"):
        assert hc.check_run(penalty, torch.optim.LBFGS(gated.parameters()), 10) == ()
    optimizer = Adam(gated.parameters(), lr=1.0)
    gated.freeze_gates()
    with pytest.warns(hc.HardConcreteWarning, match="the gates are frozen"):
        assert hc.check_run(penalty, optimizer, 10) == ()


def test_nothing_changes() -> None:
    gated = dense()
    penalty = hc.L0Penalty(gated, lambda step: 1e-3 * step, weight_decay=0.1)
    before, price = gated.gates.log_alpha.detach().clone(), penalty.prices.clone()
    hc.check_run(penalty, Adam(gated.parameters(), lr=1e-2), 10_000)
    assert torch.equal(gated.gates.log_alpha, before)
    assert torch.equal(penalty.prices, price)
    assert penalty.steps == 0
    assert gated.gates.log_alpha.grad is None
    assert all(parameter.grad is None for parameter in gated.parameters())


def test_refusals() -> None:
    gated = dense()
    optimizer = Adam(gated.parameters())
    with pytest.raises(ArgumentError, match="takes an L0Penalty or a Budget, not a GatedModel"):
        hc.check_run(gated, optimizer, 10)
    with pytest.raises(ArgumentError, match="steps=0 must be a whole number, at least 1"):
        hc.check_run(hc.L0Penalty(gated, 0.1), optimizer, 0)


# Every epoch


def two_groups() -> hc.GatedModel:
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 3))
    return hc.attach_gates(model, torch.zeros(2, 100), sites=["0:in", "1:in"])


def test_healthy_gates_get_no_warning() -> None:
    gated = two_groups()
    assert hc.check_gates(gated, loss=0.3) == ()
    gated.gates.log_alpha.data[2:] = -9.0
    gated.gates.log_alpha.data[100:103] = 9.0
    gated.gates.log_alpha.data[:3] = 9.0
    assert hc.check_gates(gated) == ()


@pytest.mark.parametrize(
    ("left", "words"),
    [(0, "0:in has collapsed: 0 of 100"), (2, "0:in has nearly collapsed: 2 of 100")],
)
def test_a_group_that_collapses(left: int, words: str) -> None:
    gated = two_groups()
    gated.gates.log_alpha.data[left:100] = -9.0
    with pytest.warns(hc.HardConcreteWarning, match=words) as caught:
        found = hc.check_gates(gated)
    assert [str(warning.message) for warning in caught] == list(found)
    assert caught[0].filename == __file__


def test_a_network_that_collapses_is_said_once() -> None:
    gated = two_groups()
    gated.gates.log_alpha.data[1:] = -9.0
    with pytest.warns(
        hc.HardConcreteWarning, match="network has collapsed: 1 of 150 units"
    ) as caught:
        hc.check_gates(gated)
    assert len(caught) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none(bad: float) -> None:
    """NaN gates are not called collapsed as well."""
    gated = two_groups()
    with pytest.warns(hc.HardConcreteWarning, match=f"the loss is {bad}"):
        hc.check_gates(gated, loss=torch.tensor(bad))
    gated(torch.ones(2, 100)).sum().backward()
    gated.gates.log_alpha.grad[120] = bad
    with pytest.warns(hc.HardConcreteWarning, match="its gradient is not finite in 1:in:"):
        hc.check_gates(gated)
    gated.gates.log_alpha.grad = None
    gated.gates.log_alpha.data[:] = bad
    with pytest.warns(
        hc.HardConcreteWarning, match="log_alpha is not finite in 0:in, 1:in:"
    ) as caught:
        hc.check_gates(gated)
    assert len(caught) == 1


def test_a_warning_can_be_an_error() -> None:
    gated = two_groups()
    nn.init.constant_(gated.gates.log_alpha, -9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hc.HardConcreteWarning)
        with pytest.raises(hc.HardConcreteWarning):
            hc.check_gates(gated)


def test_a_scheduler_that_has_begun_does_not_count_twice() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3))

    def warm_up(step: int) -> float:
        return min(1.0, step / 100)

    torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    (reach,) = hc.check_run(hc.L0Penalty(gated, lam=0.1), optimizer, 10_000, warm_up)
    assert reach.shut == 4


def test_more_steps_are_no_cure_where_the_rate_falls() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3))
    with pytest.warns(HardConcreteWarning) as caught:
        hc.check_run(hc.L0Penalty(gated, lam=0.1), optimizer, 500, lambda step: 0.99**step)
    assert "learning rate of" in str(caught[0].message)
    assert "times the steps" not in str(caught[0].message)


def pressed(
    kind: type[torch.optim.Optimizer] = Adam, **rates: float
) -> tuple[hc.Budget, torch.optim.Optimizer]:
    """Half of four inputs, and how their gates are moved."""
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    budget = hc.Budget(gated, macs=0.5, steps=1_000, by="gates")
    return budget, kind(hc.parameter_groups(gated, **rates))


def test_a_budget_whose_gates_cannot_get_there() -> None:
    budget, slow = pressed(lr=5e-4)
    with pytest.warns(
        HardConcreteWarning, match="cannot meet its budget: in 1,000 steps"
    ) as caught:
        (reach,) = hc.check_run(budget, slow, 1_000)
    assert caught[0].filename == __file__
    assert reach.shut == 0
    assert "Give them a learning rate of 0.0011 or more (now 0.0005" in str(caught[0].message)
    for enough in ({"lr": 1.2e-3}, {"lr": 1e-3, "gate_lr": 1e-2}):
        assert hc.check_run(*pressed(**enough), 1_000)[0].shut >= 2
    sgd = torch.optim.SGD(hc.parameter_groups(budget.gated, lr=0.1))
    assert hc.check_run(budget, sgd, 1_000)[0].shut == 4  # its price may grow as it must


@pytest.mark.unwatched
def test_decay_that_no_rate_overcomes() -> None:
    budget, _ = pressed(lr=1e-3)
    held = torch.optim.AdamW([budget.gated.gates.log_alpha], lr=1e-5, weight_decay=50.0)
    words = r"No learning rate up to 0.0029 would do \(now 1e-05.* weight decay pulls gates open"
    with pytest.warns(HardConcreteWarning, match=words):
        hc.check_run(budget, held, 1_000)


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("kind", "rate"), [(Adam, 5e-4), (Adam, 8e-4), (torch.optim.RAdam, 1.5e-3)]
)
def test_a_budget_under_adam_is_followed(kind: type[torch.optim.Optimizer], rate: float) -> None:
    """Its steps are larger than the learning rate as long as prices grow; not RAdam's first."""
    budget, optimizer = pressed(kind, lr=rate)
    with pytest.warns(HardConcreteWarning, match="cannot meet its budget"):
        (reach,) = hc.check_run(budget, optimizer, 1_000)
    for _ in range(1_000):
        optimizer.zero_grad()
        budget().backward()
        optimizer.step()
        budget.step()
    moved = reach.start - budget.gated.gates.log_alpha.mean().item()
    assert (moved > 1.5 * 1_000 * rate) == (kind is Adam)
    assert reach.start - reach.end == pytest.approx(moved, rel=0.02)


@pytest.mark.unwatched
def test_a_target_that_is_not_down_when_the_run_ends() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    quick = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3, gate_lr=0.1))
    budget = hc.Budget(gated, macs=0.5, by="gates")
    words = r"1,000 steps, and there are 300\. .* steps=300"
    with pytest.warns(HardConcreteWarning, match=words) as caught:
        hc.check_run(budget, quick, 300)
    assert caught[0].filename == __file__
    with pytest.warns(HardConcreteWarning, match=r"there are 1,000\."):  # down in the last step
        hc.check_run(budget, quick, 1000)
    hc.check_run(hc.Budget(gated, macs=0.5, steps=300, by="gates"), quick, 300)
    for _ in range(701):
        budget.step()
    hc.check_run(budget, quick, 300)  # the rest of a run that is longer than it was told


def test_a_collapse_is_seen_after_shrinking() -> None:
    model = nn.Sequential(nn.Linear(4, 500), nn.ReLU(), nn.Linear(500, 2))
    gated = hc.attach_gates(model, torch.zeros(2, 4))
    gated.gates.log_alpha.data.fill_(-20.0)[:2] = 5.0
    assert hc.shrink(gated, None)
    with pytest.warns(HardConcreteWarning, match="2 of 500 units are left"):
        assert hc.check_gates(gated)


def test_what_is_not_looked_at() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    with pytest.raises(ArgumentError, match="check_gates takes a GatedModel, not a Linear"):
        hc.check_gates(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="optimizer is a NoneType"):
        hc.check_run(hc.L0Penalty(gated, 0.1), None, 10)


def test_an_optimizer_without_the_gates() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.zeros(2, 4))
    without = torch.optim.SGD(gated.model.parameters(), lr=0.1)
    with pytest.warns(HardConcreteWarning, match="the SGD does not have the gates; build it from"):
        hc.check_gates(gated, 0.5, without)
    assert hc.check_gates(gated, 0.5, torch.optim.SGD(gated.parameters(), lr=0.1)) == ()
    hc.Budget(gated, macs=0.5)  # by importance, which moves the gates itself
    assert hc.check_gates(gated, 0.5, without) == ()
