import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.objective.constraint import constraints, delivered, expected
from tests.compaction.networks import dense

NONE = {"macs": None, "params": None, "weight_bytes": None}


@pytest.fixture
def gated() -> hc.GatedModel:
    return hc.attach_gates(dense(), torch.randn(2, 4))


def test_fractions_and_absolute_numbers(gated: hc.GatedModel) -> None:
    whole = hc.count(dense(), torch.randn(2, 4))
    first, second = constraints(gated, {"params": 0.5, "macs": 100}, None)
    assert (first.limit, first.dense) == (whole.params / 2, whole.params)
    assert (second.limit, second.dense) == (100, whole.macs)


def test_all_of_it_is_one_and_one_is_one(gated: hc.GatedModel) -> None:
    """1.0 is everything, 1 is a single one."""
    (everything,) = constraints(gated, NONE, {"0": 1.0})
    (one,) = constraints(gated, NONE, {"0": 1})
    assert (everything.limit, one.limit) == (6, 1)


def test_costs_as_parts_of_the_dense_ones(gated: hc.GatedModel) -> None:
    limits = constraints(gated, {"macs": 0.5, "params": 0.5}, {"2": 3})
    is_open = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0])
    costs = gated.ledger.cost(is_open) / gated.ledger.dense
    found = delivered(gated, limits, is_open)
    assert found.tolist() == [costs[1].item(), costs[0].item(), 1 / 5]
    assert expected(gated, limits, is_open).tolist() == pytest.approx(found.tolist())


class Chooses(nn.Linear):
    """A forward that decides by its data, so that it cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_units_need_no_trace() -> None:
    gated = hc.attach_gates(Chooses(4, 4), torch.ones(2, 4), sites=[":in"])
    budget = hc.Budget(gated, units=2, by="gates")
    assert budget.delivered() == {"units": 1.0}
    with pytest.raises(hc.HardConcreteError, match="cannot be traced"):
        hc.Budget(gated, macs=0.5, by="gates")


def test_no_limit_is_no_budget(gated: hc.GatedModel) -> None:
    with pytest.raises(ArgumentError, match="a budget needs a limit"):
        constraints(gated, NONE, None)


class Beside(nn.Module):
    """A layer that reads the inputs and what another one makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(10, 6), nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(torch.cat([x, self.a(x).relu()], 1)).relu())


def test_what_can_be_met_is_not_refused() -> None:
    """The first input of b is one of the network's, which costs a unit of the first layer more."""
    gated = hc.attach_gates(Beside(), torch.randn(1, 10), sites=["b:in"])
    gated.gates.log_alpha.data.fill_(-50.0)[15] = 50.0
    least = int(gated.delivered("macs"))
    assert hc.Budget(gated, macs=least, by="gates").constraints[0].limit == least
    with pytest.raises(ArgumentError, match=f"{100 * least / gated.ledger.dense[1]:.3g}% are not"):
        hc.Budget(gated, macs=least - 1, by="gates")
