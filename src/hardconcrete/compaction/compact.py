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
from hardconcrete.compaction.shrink_history import among_all, expanded
from hardconcrete.compaction.verify import difference, first_difference
from hardconcrete.errors import ArgumentError, CompactionError, HardConcreteWarning
from hardconcrete.gating import GatedModel, plain_copy
from hardconcrete.importance.batches import Loss
from hardconcrete.objective.projection import NOT_OF_THIS_MODEL, Projection, Projects, project

Form = Literal["auto", "module", "graph"]


def compact(
    gated: GatedModel,
    *,
    form: Form = "auto",
    min_units: int = 1,
    kept_inputs_only: bool = False,
    budget: Projects | None = None,
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
    if budget is not None and not isinstance(budget, Projects):
        raise ArgumentError(NOT_OF_THIS_MODEL)
    _look_at(gated)
    with torch.inference_mode(False):  # the small model can be trained
        if as_read:
            mask = Projection(gated, gated.gates.readout().detach(), min_units)
        elif budget is None:
            mask = project(gated, round_to=round_to, batches=batches, loss=loss)
        else:
            mask = budget.project(gated, round_to=round_to, batches=batches, loss=loss)
        small = compacted(mask.gated, mask.values, form=form, min_units=mask.min_units)
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
