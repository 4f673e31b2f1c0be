"""Compaction: plan, then apply, then prove."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hardconcrete.compaction.apply import apply_plan
from hardconcrete.compaction.external_selection import without_selection
from hardconcrete.compaction.module_form import guesses
from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.compaction.planner import make_plan
from hardconcrete.compaction.projection import constraints_of, kept, projected
from hardconcrete.compaction.shrink_history import among_all, expanded
from hardconcrete.compaction.verify import difference, first_difference
from hardconcrete.errors import ArgumentError, CompactionError, HardConcreteWarning
from hardconcrete.gating import GatedModel, plain_copy
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.score import DEFAULT_EXAMPLES
from hardconcrete.importance.stages import (
    PruningState,
    prune_in_stages,
    stages_for,
    warn_not_refitted,
)
from hardconcrete.objective import Budget, ImportanceBudget
from hardconcrete.objective.budget import BAND
from hardconcrete.objective.constraint import Constraint, delivered, expected
from hardconcrete.objective.cost_targets import CostTargets

Form = Literal["auto", "module", "graph"]

FAR_BELOW = 0.8
"""The part of its budget with less than which a training with whole groups shut has collapsed."""


def compact(
    gated: GatedModel,
    *,
    form: Form = "auto",
    min_units: int = 1,
    kept_inputs_only: bool = False,
    budget: Budget | None = None,
    round_to: int = 1,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
) -> nn.Module:
    """A plain, smaller model that computes what ``gated.eval()`` does.

    Units whose gates are shut are cut out of every parameter and buffer, and what is left of the
    gates is folded into the weights. Before it returns, the small model is compared with the gated
    one on the inputs that the gates were attached with, and on their rows in another number.

    Args:
        gated: what ``attach_gates`` returned; it is left as it is.
        form: ``"module"`` is the user's own classes with smaller tensors; ``"graph"`` the traced
            graph with its sizes rewritten, for forwards that have sizes written into them;
            ``"auto"`` tries them in this order. ``CompactionPlan.of(small).form`` says which it is.
        min_units: how many units each group keeps at least, the likeliest ones; 0 lets the inside
            of a residual branch go.
        kept_inputs_only: let the caller select the features that a gated input layer keeps; the
            small model then takes ``x.flatten(1)[:, kept]``, and ``CompactionPlan.of(small).given``
            says which are kept. Otherwise the layer selects them itself.
        budget: never exceed its limits, and leave nothing shut that would still fit. A budget by
            importance shuts the units that matter least for what they cost. Under learned gates the
            least certain units are shut, and the likeliest come back with their mean E[z]. The
            result is that of ``gated.eval()`` with these gates. Groups that are shut altogether
            come back last. With batch norms, ``recalibrate(small, batches)`` afterwards. It warns
            of a training that ended more than 2% above, or far below with whole groups shut.
            Of groups that no limit is about everything fits, and comes back.
        round_to: widths are multiples of this, as far as a group has as many units: units come back
            likewise until their block is full. Of a group that is shut altogether one block stays.
            Where sites are named, a unit can have gates at several places, and widths are others.
        batches: your batches. With them, units that must be closed or come back for the budget or
            for ``round_to`` are chosen by their importance, and the weights that stay are re-fitted
            to what ``gated.eval()`` computes (see ``prune``). Without them the gates decide.
        loss: calls the model it is given on a batch and returns a scalar.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.randn(2, 4))
        >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([5.0, -5.0, 0.0]))
        >>> small = hc.compact(gated)
        >>> small[0], small[2].in_features
        (Linear(in_features=4, out_features=2, bias=True), 2)
    """
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"compact takes what attach_gates returned, not a {type(gated).__name__}"
        )
    if form not in ("auto", "module", "graph"):
        raise ArgumentError(f"form={form!r} is not known; use 'auto', 'module' or 'graph'")
    if min_units < 0:
        raise ArgumentError(f"min_units={min_units} must not be negative")
    if not isinstance(round_to, int) or isinstance(round_to, bool) or round_to < 1:
        raise ArgumentError(f"round_to={round_to} must be a whole number, at least 1")
    as_read = budget is None and round_to == 1
    if not as_read and min_units != 1:
        raise ArgumentError("with a budget or round_to each group keeps a block: leave min_units=1")
    if (batches is None) != (loss is None):
        raise ArgumentError(
            "batches and loss belong together: with both, units are closed by their importance; "
            "with neither, by their gates"
        )
    _look_at(gated)
    with torch.inference_mode(False):  # the small model can be trained
        least = min_units if as_read else kept(gated, round_to)
        if as_read:
            values = gated.gates.readout().detach()
        elif batches is not None and loss is not None:
            student = _by_importance(gated, budget, round_to, batches, loss)
            gated, values = student.gated, student.gates
        else:
            values = projected(gated, budget, round_to)
            if budget is not None:
                _look_back(gated, budget)
        small = compacted(gated, values, form=form, min_units=least)
    return without_selection(small, gated.example) if kept_inputs_only else small


def compacted(
    gated: GatedModel, values: Tensor, *, form: Form = "auto", min_units: int = 1
) -> nn.Module:
    """A plain, smaller model that computes what the gated one does at these values of its gates."""
    dense = expanded(gated)
    plain = plain_copy(dense)
    plan = make_plan(dense, plain, min_units=min_units, values=among_all(gated, values))
    reference = copy.deepcopy(gated)
    failures = []
    with reference.gates.holding(None, values):
        for candidate in _candidates(plan, plain, form):
            small, failure = _attempt(candidate, plain, reference.model, gated.example)
            if small is not None:
                return small
            failures.append(f"as {candidate.form}: {failure}")
    hint = ". Ask for form='auto' to allow the graph form" if form == "module" else ""
    why = "; ".join(dict.fromkeys(failures))
    raise CompactionError(f"{type(plain).__name__} could not be made small. {why}{hint}")


def _by_importance(
    gated: GatedModel, budget: Budget | None, round_to: int, batches: Iterable[Any], loss: Loss
) -> PruningState:
    """A copy that fits, re-fitted where something had to change."""
    limits = () if budget is None else constraints_of(gated, budget)
    student = PruningState(copy.deepcopy(gated), keep_batches(batches, DEFAULT_EXAMPLES), loss)
    targets = CostTargets(student.gated, limits, student.is_open)
    prune_in_stages(student, targets, stages=stages_for(targets.log_reduction), round_to=round_to)
    warn_not_refitted(student)
    return student


def _look_at(gated: GatedModel) -> None:
    """Refuse what is no number, and say where nothing is left."""
    by_group = gated.by_group(gated.gates.log_alpha.detach())
    broken = [name for name, own in by_group.items() if own.isnan().any()]
    if broken:
        raise CompactionError(
            f"log_alpha is not a number in {', '.join(broken)}: go back to the last checkpoint"
        )
    if not gated.gates.readout().any():
        _warn(
            "no gate is open: the network has collapsed, and what is left was never trained alone"
        )


def _look_back(gated: GatedModel, budget: Budget) -> None:
    """Say where units are shut that the network was trained with, or come back that were not."""
    is_open = (gated.gates.readout().detach() > 0).double()
    limits, costs = budget.constraints, delivered(gated, budget.constraints, is_open).tolist()
    parts = [cost * limit.dense / limit.limit for cost, limit in zip(costs, limits, strict=True)]
    for group in gated.groups:
        own = [k for k, limit in enumerate(limits) if group.start in _range(limit, gated)]
        nearest = max(own, key=parts.__getitem__, default=None)
        shut = group.keeps_one and not is_open[group.slice].any()
        if shut and nearest is not None and parts[nearest] < FAR_BELOW:
            found = _found(gated, limits[nearest], costs[nearest])
            _warn(
                f"the training ended far below its budget, {found}, and has shut {group.name} "
                "altogether: units come back now that the network has not been trained with. "
                "Train longer, with steps=... of the budget, or with a larger one"
            )
            break
    cure = (
        "Train until the budget has fixed the units, or pass batches=... and loss=... to re-fit "
        "those that stay"
        if isinstance(budget, ImportanceBudget)
        else "Train longer, or with a larger learning rate of the gates; hc.check_run says before "
        "the first step how far they get"
    )
    for limit, cost, part in zip(limits, costs, parts, strict=True):
        if part > 1 + BAND:
            _warn(
                f"the training ended above its budget, {_found(gated, limit, cost)}: units are "
                f"shut now that the network still uses. {cure}"
            )


def _range(limit: Constraint, gated: GatedModel) -> range:
    return range(*limit.gates(gated).indices(len(gated.gates.log_alpha)))


def _found(gated: GatedModel, limit: Constraint, cost: float) -> str:
    """What there is of a cost, and what there should be."""
    probability = gated.gates.distribution().open_probability.detach()
    mean = expected(gated, [limit], probability, exactly=True).item()
    return (
        f"with {cost:.1%} of the {limit.label} delivered and {mean:.1%} expected instead of "
        f"{limit.limit / limit.dense:.1%}"
    )


def _warn(words: str) -> None:
    warnings.warn(words, HardConcreteWarning, stacklevel=4)


def _candidates(plan: CompactionPlan, plain: nn.Module, form: Form) -> Iterator[CompactionPlan]:
    """What can be tried: plain modules, with sizes among their attributes replaced, a graph."""
    if form != "graph":
        yield replace(plan, form="module")
        for guess in guesses(plan, plain):
            yield replace(plan, form="module", attributes={**plan.attributes, **guess})
    if form != "module":
        yield replace(plan, form="graph")


def _attempt(
    plan: CompactionPlan, plain: nn.Module, reference: nn.Module, example: Any
) -> tuple[nn.Module | None, str]:
    """A small model, if it computes the same; else why not."""
    try:
        small = apply_plan(plan, plain, *example)
        gap = difference(reference, small, example)
    except Exception as error:  # the user's forward may fail in any way
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    if gap <= 1:
        return small, ""
    where = first_difference(reference, small, example)
    return None, f"its outputs differ by {gap:.3g} times what is tolerated ({where})"
