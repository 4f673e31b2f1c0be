import copy

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError


def make() -> hc.GatedModel:
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(3, 4))
    with torch.no_grad():
        gated.gates.log_alpha.copy_(torch.tensor([-9.0, -9.0, 3.0, 3.0, 3.0, 3.0]))
    return gated


@pytest.mark.parametrize("cost", ["params", "macs", "weight_bytes", "group_size"])
def test_the_short_ways_ask_the_costs(cost: str) -> None:
    gated = make()
    assert torch.equal(gated.expected(cost), gated.costs.expected(cost))
    assert torch.equal(gated.delivered(cost), gated.costs.delivered(cost))
    assert gated.delivered(cost).item() < gated.costs.dense(cost)
    whole = hc.attach_gates(hc.remove_gates(make()), torch.zeros(3, 4))
    assert whole.delivered(cost).item() == gated.costs.dense(cost)


def test_dense_costs_stay_those_of_the_dense_model() -> None:
    gated = make()
    before = {cost: gated.costs.dense(cost) for cost in ("macs", "group_size")}
    assert hc.shrink(gated, None)
    assert {cost: gated.costs.dense(cost) for cost in before} == before


def test_the_ledger_is_made_once_and_shared_by_copies() -> None:
    gated = make()
    assert gated.cost_tables.ledger is None
    assert gated.ledger is gated.costs.ledger is copy.deepcopy(gated).ledger
    assert not gated.costs.has_latency


def test_costs_in_words() -> None:
    lines = str(make().costs).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["params", "macs", "weight_bytes"]
    assert "delivered, of 44" in lines[0]


def test_an_unknown_cost_is_refused() -> None:
    for ask in (make().costs.dense, make().expected, make().delivered):
        with pytest.raises(ArgumentError, match="cost='flops' is not known; use one of 'params'"):
            ask("flops")
