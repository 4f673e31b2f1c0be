"""Prune one model to several sizes, each from the next larger one."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hardconcrete.compaction.compact import cut_and_verify
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.stages import (
    PruningState,
    prune_in_stages,
    stages_for,
    warn_not_refitted,
)
from hardconcrete.objective.constraint import LABELS, constraints
from hardconcrete.objective.cost_targets import CostTargets
from hardconcrete.pruning.progress import PruningProgress
from hardconcrete.pruning.prune import PruningRequest, attach_open_gates


def start_pruning(
    model: nn.Module,
    inputs: tuple[Any, Mapping[str, Any] | None],
    batches: Iterable[Any],
    loss: Loss,
    request: PruningRequest,
    examples: int,
) -> PruningState:
    """A copy of the model; with open gates if it is not gated."""
    if not isinstance(model, GatedModel):
        return attach_open_gates(model, inputs, batches, loss, request, examples)
    if inputs != (None, None) or request.include or request.exclude:
        raise ArgumentError(
            "a gated model knows its inputs and groups: pass example_inputs=None, and neither "
            "kwargs nor include nor exclude"
        )
    return PruningState(copy.deepcopy(model), keep_batches(batches, examples), loss)


def prune_to_sizes(
    state: PruningState,
    fractions: Sequence[float],
    cost: str,
    round_to: int,
    progress: bool | None,
) -> dict[float, nn.Module]:
    """A small model for each fraction of a dense cost.

    Args:
        state: the model. It is changed.
        fractions: of the dense cost, in any order.
        cost: ``"macs"``, ``"params"``, ``"weight_bytes"`` or ``"kv_bytes"``.
        round_to: widths are multiples of this.
        progress: False for no display, True for one, None for one in a terminal.
    """
    gated = state.gated
    limits = {fraction: constraints(gated, {cost: fraction}, None) for fraction in fractions}
    sizes: dict[float, nn.Module] = {}
    for fraction in sorted(limits, reverse=True):
        targets = CostTargets(gated, limits[fraction], state.is_open)
        stages = stages_for(targets.log_reduction)
        with PruningProgress(stages, progress, f"{fraction:.0%} of the {LABELS[cost]}") as bar:
            prune_in_stages(state, targets, stages=stages, round_to=round_to, on_progress=bar.say)
            bar.finish("verifying")
            sizes[fraction] = cut_and_verify(gated, state.gates)
    warn_not_refitted(state)
    return sizes
