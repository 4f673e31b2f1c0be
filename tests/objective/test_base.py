import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.objective import Penalties, Penalty


def make() -> hc.GatedModel:
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
    return hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 4))


def test_what_this_library_adds_to_a_loss_is_a_penalty() -> None:
    assert isinstance(hc.L0Penalty(make(), 0.1), Penalty)
    for by in ("importance", "gates"):
        assert isinstance(hc.Budget(make(), macs=0.5, steps=30, by=by), Penalty)
    assert isinstance(Penalties([hc.L0Penalty(make(), 0.1)]), Penalty)
    assert not isinstance(nn.Linear(2, 2), Penalty)


def test_penalties_are_summed() -> None:
    gated = make()
    warm = hc.L0Penalty(gated, lambda step: 0.1 * step)
    budget = hc.Budget(gated, macs=0.5, steps=30, by="gates")
    both = Penalties([warm, budget])
    both.step()
    assert torch.equal(both(), warm() + budget())
    assert warm.steps == 1
    state = both.state_dict()
    both.step()
    both.load_state_dict(state)
    assert warm.steps == 1
    assert budget.state_dict()["steps"] == 1


def test_what_is_no_penalty_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a Linear is no penalty: it needs __call__, step"):
        Penalties([nn.Linear(2, 2)])
    with pytest.raises(ArgumentError, match="needs one penalty at least"):
        Penalties([])
    penalty = hc.L0Penalty(make(), 0.1)
    with pytest.raises(ArgumentError, match="the state of 2 penalties, and there are 1"):
        Penalties([penalty]).load_state_dict({"0": {}, "1": {}})
    with pytest.raises(ArgumentError, match="no state of Penalties: it has no entry '0'"):
        Penalties([penalty]).load_state_dict(penalty.state_dict())
    with pytest.raises(ArgumentError, match="Penalties takes a list of them, not a L0Penalty"):
        Penalties(penalty)
