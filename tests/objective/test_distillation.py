"""The distillation loss against what it is by hand, and its refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.errors import ArgumentError


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_the_logits_part_is_a_scaled_divergence() -> None:
    student, teacher = random(5, 3), random(5, 3)
    p, q = (F.softmax(x / 3, 1) for x in (teacher, student))
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(hc.distillation_loss(student, teacher, temperature=3), expected)


def test_only_the_student_gets_a_gradient() -> None:
    student, teacher = random(5, 3).requires_grad_(), random(5, 3).requires_grad_()
    hc.distillation_loss(student, teacher).backward()
    assert student.grad is not None
    assert teacher.grad is None


def output(logits: Tensor, *states: Tensor) -> SimpleNamespace:
    return SimpleNamespace(logits=logits, hidden_states=states)


def test_hidden_states_count_where_their_shapes_agree() -> None:
    logits, a, b = random(2, 3), random(2, 4, 6), random(2, 4, 6)
    loss = hc.distillation_loss(
        output(logits, a, random(2, 4, 5)), output(logits, b, random(2, 4, 6)), hidden_weight=0.5
    )
    expected = 0.5 * (a - b).square().mean() / b.square().mean()
    torch.testing.assert_close(loss, expected)


def test_padding_does_not_count() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    logits, states = random(2, 3, 5), random(2, 3, 4)
    teacher = output(random(2, 3, 5), random(2, 3, 4))
    before = hc.distillation_loss(output(logits, states), teacher, mask=mask)
    padding = mask[..., None] == 0
    changed = output(logits.masked_fill(padding, 7.0), states.masked_fill(padding, 7.0))
    torch.testing.assert_close(hc.distillation_loss(changed, teacher, mask=mask), before)
    changed.logits[0, 0] = 7.0
    assert (hc.distillation_loss(changed, teacher, mask=mask) - before).abs() > 1e-3


def test_a_mask_of_positions_leaves_one_answer_for_each_example_alone() -> None:
    student, teacher, mask = random(2, 3), random(2, 3), torch.tensor([[1, 0], [0, 0]])
    expected = hc.distillation_loss(student, teacher)
    torch.testing.assert_close(hc.distillation_loss(student, teacher, mask=mask), expected)


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x, None), lambda x: {"logits": x}])
def test_outputs_of_every_form(form: Any) -> None:
    student, teacher = random(2, 3), random(2, 3)
    expected = hc.distillation_loss(student, teacher)
    torch.testing.assert_close(hc.distillation_loss(form(student), form(teacher)), expected)


def test_half_precision_is_computed_in_float32() -> None:
    student, teacher = random(2, 3).bfloat16(), random(2, 3).bfloat16()
    loss = hc.distillation_loss(student, teacher)
    torch.testing.assert_close(loss, hc.distillation_loss(student.float(), teacher.float()))


ONE, STATE = torch.zeros(2, 3), torch.zeros(2, 4, 6)


@pytest.mark.parametrize(
    ("student", "teacher", "settings", "words"),
    [
        (ONE, ONE, {"temperature": 0.0}, "temperature=0.0 must be positive"),
        (ONE, ONE, {"hidden_weight": -1.0}, "hidden_weight=-1.0 must not be negative"),
        (ONE, torch.zeros(2, 4), {}, r"logits are \[2, 3\] and the teacher's \[2, 4\]"),
        (ONE, {"loss": 1}, {}, "teacher_out is a dict without logits"),
        (output(ONE, STATE), ONE, {}, "only the teacher has no hidden_states"),
        (output(ONE, STATE), output(ONE, STATE, STATE), {}, "1 hidden states and the teacher 2"),
        (output(ONE, STATE), output(ONE, STATE), {"mask": ONE}, r"mask is \[2, 3\], and the"),
    ],
)
def test_refusals(student: Any, teacher: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.distillation_loss(student, teacher, **settings)
