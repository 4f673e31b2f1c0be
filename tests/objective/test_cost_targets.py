from types import SimpleNamespace

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.objective.constraint import constraints
from hardconcrete.objective.cost_targets import CostTargets


def network() -> hc.GatedModel:
    layers = nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)
    return hc.attach_gates(nn.Sequential(*layers), torch.zeros(1, 4))


def test_every_limit_comes_down_geometrically() -> None:
    gated, every = network(), torch.ones(24)
    targets = CostTargets(gated, constraints(gated, {"macs": 0.25, "params": 0.5}, None), every)
    for part in (0.0, 0.5, 1.0):
        costs, _ = targets(part)
        expected = torch.tensor([4.0, 2.0], dtype=torch.float64) ** part
        torch.testing.assert_close(costs(every), expected)
    assert not targets.is_met
    assert abs(targets.log_reduction - torch.tensor(4.0).log()) < 1e-6


def test_what_is_met_stays_at_its_limit() -> None:
    gated, few = network(), (torch.arange(24) % 4 == 0).double()
    targets = CostTargets(gated, constraints(gated, {"macs": 0.5}, None), few)
    assert targets.is_met
    assert targets.log_reduction < 0
    assert targets(0.0)[0](few) == targets(1.0)[0](few) < 1


def test_without_a_limit_nothing_costs() -> None:
    targets = CostTargets(network(), (), torch.ones(24))
    costs, settings = targets(1.0)
    assert costs(torch.ones(24)).tolist() == [0]
    assert not settings.reopen
    assert targets.is_met
    assert targets.log_reduction == 0


def test_units_of_traced_groups_cost_the_same() -> None:
    gated = network()
    _, settings = CostTargets(gated, constraints(gated, {"macs": 0.5}, None), torch.ones(24))(1.0)
    assert settings.equal_cost_groups == {0, 1}
    (mask,) = settings.fallback_masks(torch.ones(24, dtype=torch.float64))
    assert [mask[group.slice].sum() for group in gated.groups] == [1, 1]


def test_units_closed_earlier_open_again_only_if_asked() -> None:
    gated = network()
    targets = CostTargets(gated, constraints(gated, {"macs": 0.5}, None), torch.ones(24))
    assert targets(1.0)[1].reopen
    assert not targets(1.0, reopen=False)[1].reopen


def test_no_ledger_is_made_for_units() -> None:
    gated = network()
    targets = CostTargets(gated, constraints(gated, {}, 0.5), torch.ones(24))
    assert targets(1.0)[0](torch.ones(24)).tolist() == [2.0]
    assert gated.cost_tables.ledger is None


def test_a_new_ledger_is_used_after_shrinking() -> None:
    gated = network()
    targets = CostTargets(gated, constraints(gated, {"macs": 0.5}, None), torch.ones(24))
    with torch.no_grad():
        gated.gates.log_alpha[4:16] = -20.0
    assert hc.shrink(gated, None)
    costs = targets(1.0)[0](torch.ones(12))
    torch.testing.assert_close(0.5 * costs[0], gated.delivered("macs") / gated.ledger.dense[1])


def test_latency_is_followed_by_its_smooth_table() -> None:
    gated = network()
    table = SimpleNamespace(
        dense=24.0,
        delivered=lambda is_open: 8 * (is_open.sum() / 8).ceil(),
        expected=lambda gates: gates.sum(),
    )
    gated.cost_tables.latency = table  # type: ignore[assignment]
    limits = constraints(gated, {}, None, latency_ms=16.0)
    costs, settings = CostTargets(gated, limits, torch.ones(24))(1.0)
    assert settings.smooth_costs is not None
    gates = torch.ones(24, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(settings.smooth_costs(gates).sum(), gates)
    torch.testing.assert_close(slope, torch.full_like(slope, 1 / 16))
    assert costs(torch.ones(24)).tolist() == [1.5]
