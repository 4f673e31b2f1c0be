"""``prune``: from a trained model to a smaller one, without training."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction import compact
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel, Site, attach_gates, remove_gates
from hardconcrete.gating.placement import put_on
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.refit import refit
from hardconcrete.importance.score import EXAMPLES, measure_importance
from hardconcrete.importance.select import select_units
from hardconcrete.objective.constraint import Constraint, Limit, constraints, delivered

OPEN = 10.0
"""log_alpha of a gate that stays: its readout is exactly 1."""

STAGES = 6
"""Cuts on the way to the limit: importance changes as units go."""


def prune(
    model: nn.Module,
    example_inputs: Any,
    batches: Iterable[Any],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    *,
    macs: Limit | None = None,
    params: Limit | None = None,
    stages: int = STAGES,
    examples: int = EXAMPLES,
    round_to: int = 1,
) -> nn.Module:
    gated = attach_gates(copy.deepcopy(model), example_inputs, kwargs)
    limits = constraints(gated, {"macs": macs, "params": params}, None)
    kept = keep_batches(batches, examples)
    is_open = torch.ones_like(gated.gates.log_alpha, dtype=torch.float64)
    start = delivered(gated, limits, is_open)
    end = torch.tensor([c.limit / c.dense for c in limits], dtype=torch.float64)
    for stage in range(1, stages + 1):
        score = measure_importance(gated, kept, loss, is_open.float())
        target = start * (end / start) ** (stage / stages)
        is_open = select_units(score, gated.groups, is_open, lambda z: delivered(gated, limits, z) / target, round_to=round_to if stage == stages else 1)
        shut(gated, is_open)
        student = remove_gates(gated)
        refit(student, model, kept, loss)
        put_on(student, gated.groups, gated.gates)
    return compact(gated.eval())


@torch.no_grad()
def shut(gated, is_open):
    from hardconcrete.compaction.death import masks
    log_alpha = gated.gates.log_alpha
    log_alpha.copy_(torch.where(is_open > 0, OPEN, -OPEN))
    params = dict(gated.model.named_parameters(remove_duplicate=False))
    from hardconcrete.gating.groups import ungated
    for name, z in masks(gated, gated.model, is_open.to(log_alpha.dtype)).items():
        ungated(gated.model, name).mul_(z)
