"""``prune``: make a trained model smaller without training."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.arguments import refuse_no_count
from hardconcrete.compaction.compact import Form, cut_and_verify
from hardconcrete.errors import ArgumentError, HardConcreteError, HardConcreteWarning
from hardconcrete.gating import GatedModel, attach_gates
from hardconcrete.gating.costs import LATENCY
from hardconcrete.graph.model_state import detached_copy, random_state_kept
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.score import DEFAULT_EXAMPLES, first_call
from hardconcrete.importance.stages import (
    DEFAULT_STAGES,
    PruningState,
    prune_in_stages,
    warn_not_refitted,
)
from hardconcrete.objective.constraint import Constraint, Limit, constraints
from hardconcrete.objective.cost_targets import CostTargets
from hardconcrete.pruning.progress import PruningProgress
from hardconcrete.units.uniform import uniform_classes


def prune(
    model: nn.Module,
    example_inputs: Any,
    batches: Iterable[Any],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    *,
    macs: Limit | None = None,
    params: Limit | None = None,
    weight_bytes: Limit | None = None,
    kv_bytes: Limit | None = None,
    latency_ms: float | None = None,
    units: Limit | Mapping[str, Limit] | None = None,
    round_to: int = 1,
    uniform: bool = False,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    stages: int = DEFAULT_STAGES,
    examples: int = DEFAULT_EXAMPLES,
    min_units: int = 1,
    form: Form = "auto",
    progress: bool | None = None,
) -> nn.Module:
    """Make a trained model smaller, without training. Your model is not changed.

    Pruning runs in stages, in evaluation mode. Each stage measures the importance of every unit
    (the mean of (dL/dz)^2, see ``importance``) and removes the units with the smallest ratio of
    importance to cost. Then the remaining weights are re-fitted by least squares, so that each
    layer computes what it did in the trained model. In the end the small model is verified, as
    ``compact`` does. Its plan is ``CompactionPlan.of(small)``. Train it for some epochs to make it
    better.

    Args:
        model: any module that ``find_groups`` can trace.
        example_inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs that
            the model can be called with. None if all are in ``kwargs``.
        batches: an iterable of your batches, for example a ``DataLoader``. The first ones are
            kept, until they hold ``examples``. They may be training data.
        loss: calls the model on a batch and returns a scalar.
        kwargs: keyword inputs of the call with the example inputs.
        macs: multiply-adds. A float up to 1 is a fraction of the dense total, an int is absolute,
            for the examples in ``example_inputs``.
        params: parameters, likewise.
        weight_bytes: memory of parameters and buffers, likewise.
        kv_bytes: keys and values of all attention for one token of one example, likewise.
        latency_ms: milliseconds of one call with the example inputs, on this machine.
        units: units of all groups together, or of each by name: ``{"conv1": 10, "fc1": 0.2}``.
        round_to: widths are multiples of this, except in groups with fewer units.
        uniform: the same groups of all layers keep equally many units, so that one number in a
            configuration describes them.
        include: patterns such as ``"layers.*"``: only groups with such names lose units.
        exclude: patterns of groups that lose no units.
        stages: how often importance is measured, units are removed and weights are re-fitted.
        examples: how many examples to use; more make a better model, and take longer.
        min_units: 0 lets the whole inside of a branch go, such as an attention or the feed-forward
            layers of a block; with 1 each group keeps a unit.
        form: ``"module"``, ``"graph"`` or ``"auto"``; see ``compact``.
        progress: False for no display, True for one, None for one in a terminal.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        >>> model, x = torch.nn.Sequential(*layers), torch.randn(256, 8)
        >>> loss = lambda model, x: (model(x) - x[:, :2]).square().mean()
        >>> small = hc.prune(model, x[:1], x.split(64), loss, macs=0.5)
        >>> small[0]
        Linear(in_features=8, out_features=32, bias=True)
    """
    refuse_no_count(round_to=round_to, stages=stages, examples=examples)
    if form not in get_args(Form):
        raise ArgumentError(f"form={form!r} is not known; use 'auto', 'module' or 'graph'")
    if not isinstance(progress, bool | None):
        raise ArgumentError(f"progress={progress!r} must be None, True or False")
    limits = {
        "macs": macs,
        "params": params,
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
    }
    request = PruningRequest(limits, units, latency_ms, include, exclude, min_units)
    with random_state_kept(), torch.inference_mode(False), PruningProgress(stages, progress) as bar:
        inputs = example_inputs, kwargs
        state = attach_open_gates(model, inputs, batches, loss, request, examples)
        classes = uniform_classes(state.gated.groups, state.gated.model) if uniform else ()
        targets = CostTargets(state.gated, request.constraints(state.gated), state.is_open)
        if targets.is_met:
            _warn_nothing_to_prune(request)
        else:
            prune_in_stages(
                state,
                targets,
                stages=stages,
                round_to=round_to,
                classes=classes,
                on_progress=bar.say,
            )
        bar.finish("verifying")
        small = cut_and_verify(state.gated, state.gates, form=form)
    warn_not_refitted(state)
    return small


@dataclass(frozen=True)
class PruningRequest:
    """The limits for the small model, and the groups that may lose units. See ``prune``."""

    limits: Mapping[str, Limit | None]
    units: Limit | Mapping[str, Limit] | None = None
    latency_ms: float | None = None
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    min_units: int = 1

    @property
    def limits_in_words(self) -> str:
        """The limits as keyword arguments: ``macs=0.5, units=10``."""
        limits = {**self.limits, LATENCY: self.latency_ms, "units": self.units}
        return ", ".join(f"{name}={value!r}" for name, value in limits.items() if value is not None)

    def constraints(self, gated: GatedModel) -> tuple[Constraint, ...]:
        """The limits that the dense model exceeds. One that cannot be met is refused."""
        limits = {
            name: limit
            for name, limit in self.limits.items()
            if limit is not None and not _is_met_by_dense(limit, gated, name)
        }
        latency_ms = self.latency_ms
        if isinstance(latency_ms, int | float) and latency_ms >= gated.latency.dense:
            latency_ms = None
        if not limits and latency_ms is None and self.units is None:
            return ()
        return constraints(gated, limits, self.units, latency_ms)


def _is_met_by_dense(limit: Limit, gated: GatedModel, name: str) -> bool:
    """Whether the dense model is within an absolute limit."""
    absolute = isinstance(limit, Integral) and not isinstance(limit, bool)
    return absolute and 0 < gated.delivered(name).item() <= limit


def attach_open_gates(
    model: nn.Module,
    inputs: tuple[Any, Mapping[str, Any] | None],
    batches: Iterable[Any],
    loss: Loss,
    request: PruningRequest,
    examples: int,
) -> PruningState:
    """A copy of the model with open gates, and the batches. Bad arguments are refused here."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prune takes a module, not a {type(model).__name__}")
    if isinstance(model, GatedModel):
        raise ArgumentError(
            "prune takes a plain model; for one with gates there is compact(gated, budget=..., "
            "batches=..., loss=...)"
        )
    if not request.limits_in_words:
        raise ArgumentError("prune needs a limit, for example prune(..., macs=0.5)")
    kept = keep_batches(batches, examples)
    dense = detached_copy(model)
    _try_loss(dense, kept[0], loss)
    gated = attach_gates(
        dense,
        *inputs,
        include=request.include,
        exclude=request.exclude,
        min_units=request.min_units,
    )
    return PruningState(gated, kept, loss)


def _try_loss(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Call the loss once; an error in it is raised with the devices of model and batch."""
    try:
        first_call(model, batch, loss)
    except HardConcreteError:
        raise
    except Exception as error:
        model_devices = {parameter.device for parameter in model.parameters()}
        batch_devices = {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        hint = ""
        if batch_devices - model_devices:
            batch_names, model_names = _names(batch_devices), _names(model_devices)
            hint = f": the batch is on {batch_names} and the model on {model_names}"
        raise ArgumentError(f"loss(model, batch) failed{hint}; it said {error!r}") from error


def _names(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))


def _warn_nothing_to_prune(request: PruningRequest) -> None:
    warnings.warn(
        f"the model is within {request.limits_in_words} already: nothing was pruned",
        HardConcreteWarning,
        stacklevel=3,
    )
