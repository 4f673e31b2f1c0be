"""A student that loses units: what is re-fitted, and what stays as it was."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.importance.select import Selection
from hardconcrete.importance.stages import Student, cut_in_stages
from hardconcrete.units.group import raw_parameter

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.fixture
def student() -> Student:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return Student(hc.attach_gates(model, X[:2]), X.split(16), loss)


def outputs(student: Student) -> Tensor:
    with torch.no_grad(), student.gated.gates.holding(None, student.gates):
        return student.gated.eval()(X)


def test_the_teacher_computes_what_the_gates_allowed() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), X[:2])
    gated.gates.log_alpha.data.copy_(torch.linspace(-3.0, 3.0, 8))
    before = gated.eval()(X)
    student = Student(copy.deepcopy(gated), X.split(16), loss)
    assert student.is_open.tolist() == (gated.gates.readout() > 0).tolist()
    assert 0 < student.is_open.sum() < 8
    torch.testing.assert_close(student.teacher.eval()(X), before)
    torch.testing.assert_close(outputs(student), before)


def test_what_stays_is_refitted_and_what_is_closed_is_kept(student: Student) -> None:
    before = copy.deepcopy(student.teacher)
    reader = raw_parameter(student.gated.model, "2.weight").detach().clone()
    student.keep(torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.float64))
    after = raw_parameter(student.gated.model, "2.weight").detach()
    assert torch.equal(after[:, :2], reader[:, :2])
    assert (after[:, 2:] != reader[:, 2:]).all()
    plain = copy.deepcopy(before)
    plain[2].weight.data[:, :2] = 0.0
    expected = before(X)
    missing = (outputs(student) - expected).square().mean()
    assert missing < 0.5 * (plain(X) - expected).square().mean()
    assert set(student.refit.fitted) == {"0.weight", "2.weight"}
    assert student.not_refitted() == {}


def test_nothing_happens_where_the_mask_stays(student: Student) -> None:
    before = copy.deepcopy(student.gated.state_dict())
    student.keep(torch.ones(8, dtype=torch.float64))
    state = student.gated.state_dict()
    assert all(torch.equal(before[name], value) for name, value in state.items())
    assert not student.refit.fitted


def test_closed_units_have_an_importance_too(student: Student) -> None:
    """What they would gain."""
    student.keep(torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.float64))
    assert (student.importance() > 0).all()


def test_stages_come_down_to_the_limits(student: Student) -> None:
    told: list[tuple[int, str]] = []

    def descent(part: float) -> tuple[object, Selection]:
        return (lambda z: z.sum(0, keepdim=True) / (8 * 0.5**part)), Selection(reopen=True)

    cut_in_stages(student, descent, stages=2, say=lambda *words: told.append(words))  # type: ignore[arg-type]
    assert student.is_open.sum() == 4
    assert told == [(1, "importance"), (1, "re-fit"), (2, "importance"), (2, "re-fit")]
