"""A gated model that loses units in stages: importance, cut and re-fit, again and again."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError, HardConcreteWarning
from hardconcrete.gating import GatedModel, plain_copy, remove_gates
from hardconcrete.gating.folding import fold, gate_masks
from hardconcrete.gating.placement import put_gates_on
from hardconcrete.importance.batches import Loss
from hardconcrete.importance.refit import Refit, refit
from hardconcrete.importance.score import measure_importance
from hardconcrete.importance.select import Costs, Selection, select_units
from hardconcrete.units.group import raw_parameter

Descent = Callable[[float], tuple[Costs, Selection]]
"""The costs at a part of the way down, as parts of their limits there; at 1 it is the end."""

Say = Callable[[int, str], None]
"""Takes the number of a stage and what it does."""

STAGES = 6
"""Cuts on the way to half the cost or less: importance changes as units go."""


class Student:
    """A gated model, and the plain one that it was, which it imitates while it loses units.

    Attributes:
        gated: gates of 0 and 1 go with its weights; what its gates were is folded in.
        teacher: what ``gated.eval()`` computed at first, as a plain module.
        is_open: what is open now, 0 or 1, in float64 on the CPU.
        refit: what became of the last re-fit.
    """

    def __init__(self, gated: GatedModel, batches: Sequence[Any], loss: Loss) -> None:
        """Take over a copy of a model, which changes."""
        self.gated, self.batches, self.loss = gated, batches, loss
        self.refit = Refit()
        with torch.no_grad():
            values = gated.gates.readout()
            mean = gated.gates.distribution().mean
            back = mean.clamp(min=torch.finfo(mean.dtype).tiny).to(values.dtype)
            self.teacher = plain_copy(gated)
            fold(gated, self.teacher, values)
            fold(gated, gated.model, torch.where(values > 0, values, back))
        self.is_open = (values > 0).double().cpu()

    @property
    def gates(self) -> Tensor:
        """What is open, as values of the gates."""
        return self.is_open.to(self.gated.gates.log_alpha)

    def importance(self) -> Tensor:
        """Of every unit; of a closed one, what it would gain."""
        return measure_importance(self.gated, self.batches, self.loss, self.gates)

    def keep(self, is_open: Tensor) -> None:
        """Close and open units, and re-fit what is left if any changed.

        Weights that read closed units stay what they were: the units may come back.
        """
        if torch.equal(is_open, self.is_open):
            return
        self.is_open = is_open
        z = gate_masks(self.gated, self.gated.model, self.gates)
        plain = remove_gates(self.gated)
        before = {name: raw_parameter(plain, name).detach().clone() for name in z}
        fold(self.gated, plain, self.gates)
        self.refit = refit(plain, self.teacher, self.batches, self.loss)
        with torch.no_grad():
            for name, was in before.items():
                parameter = raw_parameter(plain, name)
                parameter.copy_(torch.where(z[name] != 0, parameter, was))
        put_gates_on(plain, self.gated.groups, self.gated.gates)

    def not_refitted(self) -> dict[str, str]:
        """The parameters that lost inputs and were not re-fitted, with the reason."""
        z = gate_masks(self.gated, self.gated.model, self.gates)
        lost = [name for name, mask in z.items() if (mask == 0).any()]
        unknown = "its operator is not one that can be re-fitted"
        reasons = {name: self.refit.skipped.get(name, unknown) for name in lost}
        return {name: why for name, why in reasons.items() if name not in self.refit.fitted}


def warn_of_what_was_not_refitted(student: Student) -> None:
    """One warning for all layers."""
    if skipped := student.not_refitted():
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        warnings.warn(
            f"these weights lost inputs and could not be re-fitted ({reasons}): train the small "
            "model a little, or leave their groups alone with exclude=...",
            HardConcreteWarning,
            stacklevel=3,
        )


def stages_for(depth: float) -> int:
    """How many stages a way of this length takes.

    Example:
        >>> import math
        >>> [stages_for(math.log(whole / left)) for whole, left in ((1.02, 1), (2, 1), (10, 1))]
        [1, 6, 6]
    """
    return min(STAGES, max(1, math.ceil(STAGES * depth / math.log(2))))


def cut_in_stages(
    student: Student,
    descent: Descent,
    *,
    stages: int,
    round_to: int = 1,
    say: Say = lambda _, __: None,
) -> None:
    """Bring a student down to its limits.

    Args:
        student: changes.
        descent: the costs at a part of the way.
        stages: how often importance is measured, units go, and what is left is re-fitted.
        round_to: widths are multiples of this in the end.
        say: called with what is going on.
    """
    for stage in range(1, stages + 1):
        costs, settings = descent(stage / stages)
        say(stage, "importance")
        score = student.importance().cpu()
        if student.is_open.any() and not score.any():
            raise ArgumentError(
                "loss(model, batch) does not depend on any unit, so all are equally unimportant: "
                "the gradient of every gate is zero. Check the loss, and that the model is trained"
            )
        size = round_to if stage == stages else 1
        is_open = select_units(
            score, student.gated.groups, student.is_open, costs, round_to=size, settings=settings
        )
        say(stage, "re-fit")
        student.keep(is_open)
