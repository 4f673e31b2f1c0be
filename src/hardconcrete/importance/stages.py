"""Prune a gated model in stages: measure importance, close units, re-fit, and repeat."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError, HardConcreteWarning
from hardconcrete.gating import GatedModel, plain_copy, remove_gates
from hardconcrete.gating.folding import fold, gate_masks
from hardconcrete.gating.open_values import open_values
from hardconcrete.gating.placement import put_gates_on
from hardconcrete.importance.batches import Loss
from hardconcrete.importance.refit import RefitResult, refit
from hardconcrete.importance.relevant_rows import RelevantRows, relevant_rows
from hardconcrete.importance.score import measure_importance
from hardconcrete.importance.select import Costs, SelectionSettings, select_units
from hardconcrete.units.group import raw_parameter
from hardconcrete.units.uniform import Classes

CostTargetsAt = Callable[[float], tuple[Costs, SelectionSettings]]
"""Takes the progress, 0 at the start and 1 at the limits; see ``CostTargets``."""

OnProgress = Callable[[int, str], None]
"""Takes the number of a stage, from 1, and the step that begins."""

DEFAULT_STAGES = 6
"""Stages for half the cost or less. Importance changes as units are pruned."""


class PruningState:
    """A gated model while it is pruned, and the dense model that it imitates.

    Attributes:
        gated: the model. Its former gate values are folded into its weights, which belong to gates
            of 0 and 1.
        teacher: the function that ``gated.eval()`` computed at the start, as a plain module.
        is_open: the mask of open units, 0 or 1, in float64 on the CPU.
        refit: the result of the last re-fit.
    """

    def __init__(self, gated: GatedModel, batches: Sequence[Any], loss: Loss) -> None:
        """Take over ``gated``, which is changed from here on: pass a copy."""
        self.gated, self.batches, self.loss = gated, batches, loss
        self.refit = RefitResult()
        with torch.no_grad():
            values = gated.gates.readout()
            self.teacher = plain_copy(gated)
            fold(gated, self.teacher, values)
            fold(gated, gated.model, open_values(gated))
        self.is_open = gated.gates.is_open().double().cpu()

    @property
    def gates(self) -> Tensor:
        """The mask of open units as values of the gates."""
        return self.is_open.to(self.gated.gates.device, self.gated.gates.dtype)

    @cached_property
    def _relevant_rows(self) -> list[RelevantRows]:
        return [relevant_rows(self.teacher, batch, self.loss) for batch in self.batches]

    def importance(self) -> Tensor:
        """The importance of every unit; for a closed one, that of opening it."""
        return measure_importance(self.gated, self.batches, self.loss, self.gates)

    def apply_mask(self, is_open: Tensor) -> None:
        """Close and open units, and re-fit the remaining weights if the mask changed.

        Weights behind closed units keep their values, because the units may open again.
        """
        if torch.equal(is_open, self.is_open):
            return
        self.is_open = is_open
        z = gate_masks(self.gated, self.gated.model, self.gates)
        plain = remove_gates(self.gated)
        before = {name: raw_parameter(plain, name).detach().clone() for name in z}
        fold(self.gated, plain, self.gates)
        self.refit = refit(
            plain, self.teacher, self.batches, self.loss, relevant=self._relevant_rows
        )
        with torch.no_grad():
            for name, weight in before.items():
                parameter = raw_parameter(plain, name)
                parameter.copy_(torch.where(z[name] != 0, parameter, weight))
        put_gates_on(plain, self.gated.groups, self.gated.gates)

    def not_refitted(self) -> dict[str, str]:
        """The parameters that lost inputs and were not re-fitted, with the reason."""
        z = gate_masks(self.gated, self.gated.model, self.gates)
        lost = [name for name, mask in z.items() if (mask == 0).any()]
        unknown = "its operator is not one that can be re-fitted"
        reasons = {name: self.refit.skipped.get(name, unknown) for name in lost}
        return {name: why for name, why in reasons.items() if name not in self.refit.fitted}


def warn_not_refitted(state: PruningState) -> None:
    """Warn once of all weights that lost inputs and were not re-fitted."""
    if skipped := state.not_refitted():
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        warnings.warn(
            f"these weights lost inputs and could not be re-fitted ({reasons}): train the small "
            "model a little, or leave their groups alone with exclude=...",
            HardConcreteWarning,
            stacklevel=3,
        )


def stages_for(log_reduction: float) -> int:
    """The number of stages for a reduction of cost by this factor, as a logarithm.

    Example:
        >>> import math
        >>> [stages_for(math.log(factor)) for factor in (1.02, 2, 10)]
        [1, 6, 6]
    """
    return min(DEFAULT_STAGES, max(1, math.ceil(DEFAULT_STAGES * log_reduction / math.log(2))))


def prune_in_stages(
    state: PruningState,
    targets: CostTargetsAt,
    *,
    stages: int,
    round_to: int = 1,
    classes: Classes = (),
    on_progress: OnProgress = lambda _, __: None,
) -> None:
    """Prune a model until its costs are within their limits.

    Args:
        state: the model. It is changed.
        targets: the costs, relative to their targets at a stage.
        stages: how often importance is measured, units are closed and weights are re-fitted.
        round_to: widths are multiples of this after the last stage.
        classes: names of groups that keep equally many units.
        on_progress: called before each step of a stage.
    """
    for stage in range(1, stages + 1):
        costs, settings = targets(stage / stages)
        on_progress(stage, "importance")
        score = state.importance().cpu()
        if state.is_open.any() and not score.any():
            raise ArgumentError(
                "loss(model, batch) does not depend on any unit: the gradient of every gate is "
                "zero, so no unit is more important than another. Check the loss, and that the "
                "model is trained"
            )
        size = round_to if stage == stages else 1
        is_open = select_units(
            score,
            state.gated.groups,
            state.is_open,
            costs,
            round_to=size,
            classes=classes,
            settings=settings,
        )
        on_progress(stage, "re-fit")
        state.apply_mask(is_open)
