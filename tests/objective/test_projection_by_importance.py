"""Where a budget closes units, or lets some come back, by importance on the user's batches."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, HardConcreteWarning
from tests.exactness import apart, outputs

X = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2] * x[:, 2:]).square().mean()


@pytest.fixture(scope="module")
def trained() -> hc.GatedModel:
    """With gates that say nothing of what units are worth."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model, X).backward()
        optimizer.step()
    gated = hc.attach_gates(model, X[:2])
    gated.gates.log_alpha.data.copy_(torch.linspace(1.0, 4.0, 40))
    return gated


def missing(gated: hc.GatedModel, small: nn.Module) -> float:
    with torch.no_grad():
        expected = copy.deepcopy(gated).eval()(X)
        return float((small.eval()(X) - expected).square().mean() / expected.var())


SETTINGS: dict[str, Any] = {"batches": X.split(32), "loss": loss}
by_gates = pytest.mark.filterwarnings("ignore:the training ended above its budget")


@by_gates
@pytest.mark.parametrize("limit", [0.7, 0.5])
def test_it_is_nearer_to_what_the_model_computes(trained: hc.GatedModel, limit: float) -> None:
    budget = hc.Budget(trained, macs=limit, by="gates")
    before = copy.deepcopy(trained.state_dict())
    small = hc.compact(trained, budget=budget, **SETTINGS)
    assert hc.count(small, X[:2]).macs <= limit * trained.ledger.dense[1]
    assert missing(trained, small) < 0.3 * missing(trained, hc.compact(trained, budget=budget))
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())


def test_what_fits_stays_as_it_was(trained: hc.GatedModel) -> None:
    gated = copy.deepcopy(trained)
    gated.gates.log_alpha.data[::4] = 0.5  # neither 0 nor 1
    small = hc.compact(gated, budget=hc.Budget(gated, macs=1.0, by="gates"), **SETTINGS)
    assert apart(outputs(gated.eval(), ((X,), {})), outputs(small.eval(), ((X,), {}))) < 1e-5
    assert small[0].out_features == 24


def test_closed_units_come_back_where_they_fit(trained: hc.GatedModel) -> None:
    gated = copy.deepcopy(trained)
    gated.gates.log_alpha.data[:20] = -3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = hc.compact(gated, budget=hc.Budget(gated, units=30, by="gates"), **SETTINGS)
    assert small[0].out_features + small[2].out_features == 30
    assert missing(gated, small) < 5e-3  # fitted to do no harm


def test_widths_are_multiples(trained: hc.GatedModel) -> None:
    gated = copy.deepcopy(trained)
    gated.gates.log_alpha.data[:5] = gated.gates.log_alpha.data[24:27] = -3.0
    small = hc.compact(gated, round_to=8, **SETTINGS)
    assert (small[0].out_features, small[2].out_features) == (24, 16)
    small = hc.compact(gated, round_to=8, budget=hc.Budget(gated, macs=0.6, by="gates"), **SETTINGS)
    assert {small[0].out_features % 8, small[2].out_features % 8} == {0}
    assert hc.count(small, X[:2]).macs <= 0.6 * gated.ledger.dense[1]


def test_a_group_that_is_shut_keeps_a_block_that_is_counted(trained: hc.GatedModel) -> None:
    gated = copy.deepcopy(trained)
    gated.gates.log_alpha.data[24:] = -9.0
    small = hc.compact(gated, round_to=4, budget=hc.Budget(gated, macs=0.4, by="gates"), **SETTINGS)
    assert small[2].out_features % 4 == 0
    assert hc.count(small, X[:2]).macs <= 0.4 * gated.ledger.dense[1]


@by_gates
@pytest.mark.filterwarnings("ignore:these weights lost inputs")
@pytest.mark.parametrize("sites", [["0:out", "3:in"], ["3:each"]])
def test_named_sites(sites: list[str]) -> None:
    """Nested gates, and single weights, of which only a limit on units lets any go."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 20), nn.ReLU()
    images = torch.randn(64, 1, 4, 4)
    model = nn.Sequential(*layers, nn.Linear(20, 3))
    gated = hc.attach_gates(model, images[:2], sites=sites, droprate=0.05)
    limit: dict[str, Any] = {"units": 0.5} if sites == ["3:each"] else {"macs": 0.4}
    settings: dict[str, Any] = {"batches": images.split(16)}
    settings["loss"] = lambda model, x: model(x).square().mean()
    small = hc.compact(gated, budget=hc.Budget(gated, **limit, by="gates"), **settings)
    if "macs" in limit:
        assert 0.35 < hc.count(small, images[:2]).macs / gated.ledger.dense[1] <= 0.4
    else:
        assert 0.45 < (small[3].weight != 0).float().mean() <= 0.5


def test_a_shrunk_model(trained: hc.GatedModel) -> None:
    gated = copy.deepcopy(trained)
    gated.gates.log_alpha.data[:8] = -9.0
    hc.shrink(gated, None)
    assert gated.model[0].out_features == 16
    small = hc.compact(gated, budget=hc.Budget(gated, macs=0.3, by="gates"), **SETTINGS)
    assert hc.count(small, X[:2]).macs <= 0.3 * gated.ledger.dense[1]
    assert missing(gated, small) < 0.5


def test_batches_and_loss_belong_together(trained: hc.GatedModel) -> None:
    budget = hc.Budget(trained, macs=0.5, by="gates")
    for given in ("batches", "loss"):
        with pytest.raises(ArgumentError, match="batches and loss belong together"):
            hc.compact(trained, budget=budget, **{given: SETTINGS[given]})


def trained_to(units: int) -> tuple[hc.GatedModel, hc.Budget]:
    """By importance: later units of 24 weigh more in the loss, and nothing is learnt."""
    layers = nn.Linear(4, 24), nn.Linear(24, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), X[:2])
    with torch.no_grad():
        for parameter in gated.model.parameters():
            parameter.fill_(0.1)
        gated.model[1]._parameters["weight"].mul_(torch.linspace(0.5, 1.5, 24).roll(5))
    budget = hc.Budget(gated, units={"0": units}, steps=20)
    for _ in range(20):
        (gated(X).square().mean() + budget()).backward()
        budget.step()
    return gated, budget


def test_blocks_are_filled_by_what_the_budget_measured() -> None:
    gated, budget = trained_to(20)
    score = budget.importance()  # type: ignore[attr-defined]
    assert gated.units_left() == (20,)
    small = hc.compact(gated, budget=budget, round_to=8)
    best = torch.zeros(24).index_fill(0, score.argsort()[-16:], 1.0)
    assert small[0].out_features == 16  # type: ignore[index]
    with gated.eval().gates.holding(None, best):
        torch.testing.assert_close(small.eval()(X), gated(X))


def test_units_that_are_shut_do_not_displace_others() -> None:
    """However much they might gain: their weights were not trained with the rest."""
    gated, budget = trained_to(20)
    shut = gated.gates.readout() == 0
    budget._running.total[shut] = 1e6  # type: ignore[attr-defined]
    small = hc.compact(gated, budget=budget, round_to=8)
    score = budget.importance() * ~shut  # type: ignore[attr-defined]
    best = torch.zeros(24).index_fill(0, score.argsort()[-16:], 1.0)
    with gated.eval().gates.holding(None, best):
        torch.testing.assert_close(small.eval()(X), gated(X))


def test_a_budget_that_measured_nothing_leaves_the_choice_to_the_gates(
    trained: hc.GatedModel,
) -> None:
    gated = copy.deepcopy(trained)
    with pytest.warns(HardConcreteWarning, match="Train until the budget has fixed the units"):
        small = hc.compact(gated, budget=hc.Budget(gated, units={"0": 8, "2": 16}))
    likeliest = torch.tensor([0.0] * 16 + [1.0] * 24) * gated.gates.readout()
    with gated.eval().gates.holding(None, likeliest.detach()):
        torch.testing.assert_close(small.eval()(X), gated(X))


@by_gates
def test_in_inference_mode(trained: hc.GatedModel) -> None:
    budget = hc.Budget(trained, macs=0.5, by="gates")
    expected = hc.compact(trained, budget=budget, **SETTINGS)
    with torch.inference_mode():
        small = hc.compact(trained, budget=budget, batches=X.clone().split(32), loss=loss)
    torch.testing.assert_close(small(X), expected(X))
