"""``prune``: from a trained model to a smaller one, without training."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.compaction.compact import Form, compacted
from hardconcrete.errors import ArgumentError, HardConcreteError, HardConcreteWarning
from hardconcrete.gating import GatedModel, attach_gates
from hardconcrete.gating.gated_model import LATENCY
from hardconcrete.graph.model_state import detached_copy, random_state_kept
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.score import EXAMPLES, first_call
from hardconcrete.importance.stages import (
    STAGES,
    Student,
    cut_in_stages,
    warn_of_what_was_not_refitted,
)
from hardconcrete.objective.constraint import Constraint, Limit, constraints
from hardconcrete.objective.descent import Descent
from hardconcrete.pruning.progress import PruningProgress


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
    latency_ms: float | None = None,
    units: Limit | Mapping[str, Limit] | None = None,
    round_to: int = 1,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    stages: int = STAGES,
    examples: int = EXAMPLES,
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
        example_inputs: a tensor, or a tuple of positional inputs, the model can be called with.
        batches: an iterable of your batches, for example a ``DataLoader``. The first ones are
            kept, until they hold ``examples``. They may be training data.
        loss: calls the model it is given on a batch and returns a scalar.
        kwargs: keyword inputs of the call with the example inputs.
        macs: multiply-adds. A float up to 1 is a fraction of the dense total, an int is absolute,
            for the examples in ``example_inputs``.
        params: parameters, likewise.
        weight_bytes: memory of parameters and buffers, likewise.
        latency_ms: milliseconds of one call with the example inputs, on this machine.
        units: units of all groups together, or of each by name: ``{"conv1": 10, "fc1": 0.2}``.
        round_to: widths are multiples of this, except in groups with fewer units.
        include: patterns such as ``"layers.*"``: only groups with such names lose units.
        exclude: patterns of groups that lose no units.
        stages: how often importance is measured, units are removed and weights are re-fitted.
        examples: how many examples to use; more make a better model, and take longer.
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
    _refuse_bad_numbers(round_to=round_to, stages=stages, examples=examples)
    limits = {"macs": macs, "params": params, "weight_bytes": weight_bytes}
    wanted = Wanted(limits, units, latency_ms, include, exclude)
    with random_state_kept(), torch.inference_mode(False), PruningProgress(stages, progress) as bar:
        gated, kept = prepared(model, (example_inputs, kwargs), batches, loss, wanted, examples)
        student = Student(gated, kept, loss)
        descent = Descent(gated, wanted.constraints(gated), student.is_open)
        if descent.is_met:
            _warn_that_limits_hold(wanted)
        else:
            cut_in_stages(student, descent, stages=stages, round_to=round_to, say=bar.say)
        bar.finish("verifying")
        small = compacted(gated, student.gates, form=form)
    warn_of_what_was_not_refitted(student)
    return small


@dataclass(frozen=True)
class Wanted:
    """What is asked of the small model, and which groups may lose units."""

    limits: Mapping[str, Limit | None]
    units: Limit | Mapping[str, Limit] | None = None
    latency_ms: float | None = None
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()

    @property
    def words(self) -> str:
        """The limits, as they were named."""
        named = {**self.limits, LATENCY: self.latency_ms, "units": self.units}
        return ", ".join(f"{name}={value!r}" for name, value in named.items() if value is not None)

    def constraints(self, gated: GatedModel) -> tuple[Constraint, ...]:
        """The limits that the dense model exceeds, each of which can be met."""
        limits = {
            name: limit
            for name, limit in self.limits.items()
            if limit is not None and not _holds(limit, gated, name)
        }
        late = self.latency_ms
        if isinstance(late, int | float) and late >= gated.latency.dense:
            late = None
        if not limits and late is None and self.units is None:
            return ()
        return constraints(gated, limits, self.units, late)


def _holds(limit: Limit, gated: GatedModel, name: str) -> bool:
    """Whether an absolute limit is above what the dense model costs."""
    absolute = isinstance(limit, Integral) and not isinstance(limit, bool)
    return absolute and limit >= gated.delivered(name).item()


def prepared(
    model: nn.Module,
    inputs: tuple[Any, Mapping[str, Any] | None],
    batches: Iterable[Any],
    loss: Loss,
    wanted: Wanted,
    examples: int,
) -> tuple[GatedModel, list[Any]]:
    """A copy with gates, all open, and the batches; all that can be refused is refused here."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prune takes a module, not a {type(model).__name__}")
    if isinstance(model, GatedModel):
        raise ArgumentError(
            "prune takes a plain model; for one with gates there is compact(gated, budget=..., "
            "batches=..., loss=...)"
        )
    if not wanted.words:
        raise ArgumentError("prune needs a limit, for example prune(..., macs=0.5)")
    kept = keep_batches(batches, examples)
    dense = detached_copy(model)
    _try(dense, kept[0], loss)
    return attach_gates(dense, *inputs, include=wanted.include, exclude=wanted.exclude), kept


def _try(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Call the loss once: what fails in the user's code comes with what was passed."""
    try:
        first_call(model, batch, loss)
    except HardConcreteError:
        raise
    except Exception as error:
        at = {parameter.device for parameter in model.parameters()}
        there = {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        hint = ""
        if there - at:
            hint = f": the batch is on {_names(there)} and the model on {_names(at)}"
        raise ArgumentError(f"loss(model, batch) failed{hint}; it said {error!r}") from error


def _names(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))


def _refuse_bad_numbers(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
            raise ArgumentError(f"{name}={number!r} must be a whole number, at least 1")


def _warn_that_limits_hold(wanted: Wanted) -> None:
    warnings.warn(
        f"the model is within {wanted.words} already: nothing was pruned",
        HardConcreteWarning,
        stacklevel=3,
    )
