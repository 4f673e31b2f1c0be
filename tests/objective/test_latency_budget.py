"""A budget of milliseconds, with a clock that reads sizes: training meets it."""

from pathlib import Path

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.cost.latency import clock
from hardconcrete.cost.latency import table as latency
from hardconcrete.errors import ArgumentError
from tests.cost import sizes


@pytest.fixture(autouse=True)
def _by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_call_times", sizes.times)
    monkeypatch.setattr(latency, "FORWARD_EXPONENT", 0.0)


def network() -> hc.GatedModel:
    torch.manual_seed(0)
    layers = nn.Linear(8, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 2)
    return hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 8), droprate=0.5)


@pytest.mark.unwatched
def test_training_meets_a_deadline() -> None:
    gated = network()
    limit = 0.5 * gated.latency.dense
    budget = hc.Budget(gated, latency_ms=limit, steps=400, by="gates")
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3, gate_lr=2e-2))
    for _ in range(400):
        x = torch.randn(64, 8)
        loss = (gated(x) - x[:, :2]).square().mean() + budget()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
    assert 0.95 * limit < gated.delivered("latency_ms") < 1.05 * limit
    assert budget.delivered()["latency_ms"] == pytest.approx(0.5, abs=0.05)
    assert "milliseconds: " in str(budget)
    small = hc.compact(gated, budget=budget)
    kept = [len(own.kept) for own in hc.CompactionPlan.of(small).groups.values()]
    assert sum(kept) < 100
    assert sizes.of_the_compacted(gated, small) <= limit


def test_with_other_limits() -> None:
    gated = network()
    budget = hc.Budget(gated, latency_ms=0.7 * gated.latency.dense, macs=0.4, by="gates")
    assert set(budget.target()) == {"latency_ms", "macs"}
    assert budget().isfinite()


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (0, "must be a number of milliseconds above 0"),
        (-1.0, "must be a number of milliseconds above 0"),
        (float("nan"), "must be a number of milliseconds above 0"),
        (True, "must be a number of milliseconds above 0"),
        (1e9, "is met by the dense model, which takes"),
        (1e-3, "of the milliseconds cannot be met"),
    ],
)
def test_refusals(limit: float, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.Budget(network(), latency_ms=limit, by="gates")


def test_a_table_that_was_measured_anew_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = network()
    budget = hc.Budget(gated, latency_ms=0.5 * gated.latency.dense, steps=60, by="gates")
    (before,) = budget._costs_in_bands(budget._open())[0].tolist()
    monkeypatch.setattr(
        clock, "_call_times", lambda *a, **k: [1.1 * t for t in sizes.times(*a, **k)]
    )
    gated.measure_latency(fresh=True)
    assert budget._costs_in_bands(budget._open())[0].item() == pytest.approx(1.1 * before)


def test_a_state_goes_on_where_the_table_was_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = network()
    deadline = 0.5 * gated.latency.dense
    state = hc.Budget(gated, latency_ms=deadline, steps=60, by="gates").state_dict()
    before = gated.latency.dense
    monkeypatch.setattr(
        clock, "_call_times", lambda *a, **k: [1.1 * t for t in sizes.times(*a, **k)]
    )
    gated.measure_latency(fresh=True)
    assert gated.latency.dense > before
    hc.Budget(gated, latency_ms=deadline, steps=60, by="gates").load_state_dict(state)
    with pytest.raises(ArgumentError, match="other limits or steps"):
        hc.Budget(gated, latency_ms=0.9 * deadline, steps=60, by="gates").load_state_dict(state)
