"""Distillation: a small model learns from the outputs of the dense one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hardconcrete.arguments import refuse_no_number
from hardconcrete.errors import ArgumentError

TEMPERATURE = 2.0
"""Default temperature of the logits; higher ones show more of what the teacher finds similar."""

MIN_MEAN_SQUARE = 1e-12
"""Stands for the mean square of hidden states that are all zero."""


def distillation_loss(
    student_out: Any,
    teacher_out: Any,
    *,
    temperature: float = TEMPERATURE,
    hidden_weight: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """How far a student's outputs are from a teacher's, to add to a loss or to use alone.

    The logits' part is T^2 times the mean of KL(teacher || student) at temperature T
    (Hinton et al., 2015). If both outputs have ``hidden_states``, their part is the mean over
    layers of the squared error, relative to the mean square of the teacher's states. Layers whose
    shapes differ are left out. The teacher gets no gradient.

    Args:
        student_out: logits; or an output with ``logits``, as those of Hugging Face or a dict; or a
            tuple that starts with logits.
        teacher_out: the teacher's output for the same batch.
        temperature: divides the logits.
        hidden_weight: multiplies the part of the hidden states; 0 leaves it out.
        mask: 1 at positions that count and 0 at padding, such as ``batch["attention_mask"]``. Its
            shape is the first dimensions of the hidden states, and of logits for each position.

    Example:
        >>> import torch, hardconcrete as hc
        >>> teacher, student = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
        >>> hc.distillation_loss(teacher, teacher).item()
        0.0
        >>> round(hc.distillation_loss(student, teacher).item(), 3)
        0.444
    """
    refuse_no_number(temperature=temperature, hidden_weight=hidden_weight)
    if not 0 < temperature < math.inf:
        raise ArgumentError(f"temperature={temperature} must be positive and finite")
    if not 0 <= hidden_weight < math.inf:
        raise ArgumentError(f"hidden_weight={hidden_weight} must not be negative or infinite")
    student, teacher = _logits(student_out, "student_out"), _logits(teacher_out, "teacher_out")
    if student.shape != teacher.shape:
        raise ArgumentError(
            f"the student's logits are {list(student.shape)} and the teacher's "
            f"{list(teacher.shape)}: call both with the same batch"
        )
    loss = _divergence(student, teacher.detach(), temperature, mask)
    if hidden_weight:
        pairs = _hidden_pairs(student_out, teacher_out)
        errors = [_relative_error(mine, other.detach(), mask) for mine, other in pairs]
        loss = loss + hidden_weight * sum(errors) / max(1, len(errors))
    return loss


def _field(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _logits(out: Any, argument: str) -> Tensor:
    logits = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(logits, Tensor):
        logits = _field(out, "logits")
    if not isinstance(logits, Tensor):
        raise ArgumentError(
            f"{argument} is a {type(out).__name__} without logits; pass a tensor, an output with "
            "logits, or a tuple that starts with them"
        )
    return logits


def _divergence(
    student: Tensor, teacher: Tensor, temperature: float, mask: Tensor | None
) -> Tensor:
    dtype = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = (
        F.log_softmax(x.to(dtype) / temperature, -1) for x in (teacher.to(student.device), student)
    )
    rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    one_for_all_positions = mask is not None and rows.dim() < mask.dim()
    return temperature**2 * _mean(rows, None if one_for_all_positions else mask)


def _hidden_pairs(student_out: Any, teacher_out: Any) -> list[tuple[Tensor, Tensor]]:
    """The hidden states of both, layer by layer, where their shapes agree."""
    student, teacher = (_field(out, "hidden_states") for out in (student_out, teacher_out))
    if (student is None) != (teacher is None):
        missing = "student" if student is None else "teacher"
        raise ArgumentError(
            f"only the {missing} has no hidden_states: call both models with "
            "output_hidden_states=True, or pass hidden_weight=0"
        )
    if student is None:
        return []
    student, teacher = _states(student), _states(teacher)
    if len(student) != len(teacher):
        raise ArgumentError(
            f"the student has {len(student)} hidden states and the teacher {len(teacher)}: select "
            "the layers that belong together, or pass hidden_weight=0"
        )
    return [(a, b) for a, b in zip(student, teacher, strict=True) if a.shape == b.shape]


def _states(states: Any) -> Sequence[Tensor]:
    return (states,) if isinstance(states, Tensor) else tuple(states)


def _relative_error(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    dtype = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(dtype), teacher.to(student.device, dtype)
    errors, sizes = (student - teacher).square().mean(-1), teacher.square().mean(-1)
    return _mean(errors, mask) / _mean(sizes, mask).clamp(min=MIN_MEAN_SQUARE)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    if mask.shape != values.shape:
        raise ArgumentError(
            f"mask is {list(mask.shape)}, and the outputs have {list(values.shape)} positions: it "
            "needs one entry for each"
        )
    weight = mask.to(values)
    return (values * weight).sum() / weight.sum().clamp(min=1)
