"""A model that is pruned in stages: what is re-fitted, and what does not change."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.importance.select import SelectionSettings
from hardconcrete.importance.stages import PruningState, prune_in_stages
from hardconcrete.units.group import raw_parameter

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.fixture
def state() -> PruningState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return PruningState(hc.attach_gates(model, X[:2]), X.split(16), loss)


def outputs(state: PruningState) -> Tensor:
    with torch.no_grad(), state.gated.gates.holding(None, state.gates):
        return state.gated.eval()(X)


def test_the_teacher_computes_what_the_gates_allowed() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), X[:2])
    gated.gates.log_alpha.data.copy_(torch.linspace(-3.0, 3.0, 8))
    before = gated.eval()(X)
    state = PruningState(copy.deepcopy(gated), X.split(16), loss)
    assert state.is_open.tolist() == (gated.gates.readout() > 0).tolist()
    assert 0 < state.is_open.sum() < 8
    torch.testing.assert_close(state.teacher.eval()(X), before)
    torch.testing.assert_close(outputs(state), before)


def test_what_stays_is_refitted_and_what_is_closed_is_kept(state: PruningState) -> None:
    before = copy.deepcopy(state.teacher)
    reader = raw_parameter(state.gated.model, "2.weight").detach().clone()
    state.apply_mask(torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.float64))
    after = raw_parameter(state.gated.model, "2.weight").detach()
    assert torch.equal(after[:, :2], reader[:, :2])
    assert (after[:, 2:] != reader[:, 2:]).all()
    plain = copy.deepcopy(before)
    plain[2].weight.data[:, :2] = 0.0
    expected = before(X)
    missing = (outputs(state) - expected).square().mean()
    assert missing < 0.5 * (plain(X) - expected).square().mean()
    assert set(state.refit.fitted) == {"0.weight", "2.weight"}
    assert state.not_refitted() == {}


def test_nothing_happens_where_the_mask_stays(state: PruningState) -> None:
    before = copy.deepcopy(state.gated.state_dict())
    state.apply_mask(torch.ones(8, dtype=torch.float64))
    after = state.gated.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert not state.refit.fitted


def test_closed_units_have_an_importance_too(state: PruningState) -> None:
    state.apply_mask(torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.float64))
    assert (state.importance() > 0).all()


def test_stages_come_down_to_the_limits(state: PruningState) -> None:
    seen: list[tuple[int, str]] = []

    def targets(progress: float) -> tuple[object, SelectionSettings]:
        limit = 8 * 0.5**progress
        return (lambda z: z.sum(0, keepdim=True) / limit), SelectionSettings(reopen=True)

    prune_in_stages(state, targets, stages=2, on_progress=lambda *words: seen.append(words))  # type: ignore[arg-type]
    assert state.is_open.sum() == 4
    assert seen == [(1, "importance"), (1, "re-fit"), (2, "importance"), (2, "re-fit")]
