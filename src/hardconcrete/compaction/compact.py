"""Compaction: plan, apply, verify."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hardconcrete.arguments import refuse_no_count
from hardconcrete.compaction.caller_selection import let_caller_select
from hardconcrete.compaction.configuration import module_rebuilt
from hardconcrete.compaction.configuration_search import plans_with_numbers
from hardconcrete.compaction.idle_sites import warn_of_idle_sites
from hardconcrete.compaction.keep import Keep, gated_copy, values_of
from hardconcrete.compaction.not_a_number import refuse_nan
from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.compaction.planner import make_plan
from hardconcrete.compaction.shrink_history import dense_model, dense_values
from hardconcrete.compaction.size_attributes import size_guesses
from hardconcrete.compaction.verify import difference, first_difference, in_one_line
from hardconcrete.errors import ArgumentError, CompactionError, HardConcreteWarning
from hardconcrete.gating import GatedModel, plain_copy
from hardconcrete.graph.model_state import detached_copy
from hardconcrete.importance.batches import Loss
from hardconcrete.objective.projection import NOT_OF_THIS_MODEL, MaskSource, Projection, project
from hardconcrete.units.uniform import uniform_classes

Form = Literal["auto", "module", "graph"]


def compact(
    model: nn.Module,
    example_inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    keep: Keep | None = None,
    form: Form = "auto",
    min_units: int = 1,
    kept_inputs_only: bool = False,
    budget: MaskSource | None = None,
    round_to: int = 1,
    uniform: bool = False,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
) -> nn.Module:
    """A plain, smaller model that computes what the model computes without the removed units.

    A gated model loses the units whose gates are closed, and the other gates are folded into its
    weights: the result computes what ``gated.eval()`` does. A plain model keeps the units in
    ``keep``. Your model is not changed. The small model is verified before it returns: its outputs
    must equal those of your model under the same mask, for the example inputs and for another
    number of rows.

    Args:
        model: what ``attach_gates`` returned, or any module that ``find_groups`` can trace.
        example_inputs: for a plain model, a tensor, a tuple of positional inputs, or a mapping of
            keyword inputs that the model can be called with. Leave it out for a gated model.
        kwargs: keyword inputs of the same call.
        keep: which units stay, by name of the group (see ``find_groups`` or ``gated.groups``). The
            units are a mask of bools, or the indices of those that stay. Groups that you do not
            name keep all units, and those of a gated model what their gates say. A unit that you
            keep has the value of its gate, or E[z] where the gate is closed.
        form: ``"module"`` is your classes with smaller tensors. ``"graph"`` is the traced
            graph with new sizes, for forwards that have sizes written into them. ``"auto"`` tries
            them in this order. ``CompactionPlan.of(small).form`` says which one it is.
        min_units: how many units each group keeps at least, the likeliest ones. 0 lets the inside
            of a residual branch go.
        kept_inputs_only: you select the features that a gated input layer keeps: the small model
            takes ``x.flatten(1)[:, kept]``. ``CompactionPlan.of(small).kept_inputs`` has ``kept``.
            Otherwise the layer selects them.
        budget: keep its limits, and close nothing that would still fit. A budget by importance
            closes the units that matter least for their cost. Under learned gates the least certain
            units are closed, and the likeliest open again with their mean E[z]. Groups that are
            closed altogether open last; groups that no limit is about open altogether. A warning
            says if the training ended more than 2% above its limit, or far below with a whole group
            closed. With batch norms, call ``recalibrate(small, batches)`` afterwards.
        round_to: widths are multiples of this, as far as a group has as many units: units open
            until their block is full. A group that is closed altogether keeps one block. Named
            sites can gate a unit at several places; then widths may differ.
        uniform: the same groups of all layers keep equally many units, so that one number in a
            configuration describes them. Groups are the same if their names differ only in numbers
            and they have equally many units. Without a budget, units open until widths are equal.
        batches: your batches. With them, units are chosen by importance for the budget or for
            ``round_to``, and the weights that stay are re-fitted to what ``gated.eval()`` computes
            (see ``prune``). Without them the gates decide.
        loss: calls the model on a batch and returns a scalar.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> model, x = torch.nn.Sequential(*layers), torch.randn(2, 4)
        >>> small = hc.compact(model, x, keep={"0": [0, 2]})    # your mask
        >>> small[0], small[2].in_features
        (Linear(in_features=4, out_features=2, bias=True), 2)
        >>> gated = hc.attach_gates(model, x)
        >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([5.0, -5.0, 0.0]))
        >>> hc.compact(gated)[0]                                # what the gates say
        Linear(in_features=4, out_features=2, bias=True)
    """
    _check_model(model, example_inputs, kwargs, keep)
    _check_numbers(form, min_units, round_to)
    _check_mask_source(keep, budget, round_to != 1 or uniform, min_units, batches, loss)
    refuse_nan(model)
    with torch.inference_mode(False):  # the small model can be trained
        if isinstance(model, GatedModel):
            gated = model
            if keep is None:
                _warn_of_collapse(gated)
        else:
            gated = gated_copy(model, example_inputs, kwargs)
        if keep is not None:
            mask = Projection(gated, values_of(gated, keep, min_units), min_units)
        elif budget is not None:
            mask = budget.project(
                gated, round_to=round_to, uniform=uniform, batches=batches, loss=loss
            )
        elif round_to != 1 or uniform:
            classes = uniform_classes(gated.groups, gated.model) if uniform else ()
            mask = project(gated, round_to=round_to, classes=classes, batches=batches, loss=loss)
        else:
            mask = Projection(gated, gated.gates.readout().detach(), min_units)
        small = cut_and_verify(mask.gated, mask.values, form=form, min_units=mask.min_units)
    return let_caller_select(small, gated.example) if kept_inputs_only else small


def _check_model(model: Any, example_inputs: Any, kwargs: Any, keep: Any) -> None:
    """Refuse what is no model, and a plain model without a mask or inputs."""
    if isinstance(model, GatedModel):
        if example_inputs is not None or kwargs is not None:
            raise ArgumentError(
                "a gated model has the example inputs of attach_gates: leave out example_inputs "
                "and kwargs"
            )
    elif not isinstance(model, nn.Module) or keep is None:
        raise ArgumentError(
            f"compact takes what attach_gates returned, not a {type(model).__name__}; for a plain "
            "model pass example inputs and a mask, compact(model, x, keep={'conv1': [0, 2, 3]})"
        )
    elif example_inputs is None and kwargs is None:
        raise ArgumentError(
            "compact traces a plain model and verifies the small one: pass example_inputs or kwargs"
        )


def _check_numbers(form: object, min_units: object, round_to: object) -> None:
    if form not in ("auto", "module", "graph"):
        raise ArgumentError(f"form={form!r} is not known; use 'auto', 'module' or 'graph'")
    refuse_no_count(0, min_units=min_units)
    refuse_no_count(round_to=round_to)


def _check_mask_source(
    keep: object, budget: object, widths: bool, min_units: int, batches: object, loss: object
) -> None:
    """Refuse arguments that say in two ways which units stay."""
    projects = budget is not None or widths
    if keep is not None and (projects or batches is not None or loss is not None):
        raise ArgumentError(
            "keep names the units that stay: leave out budget, round_to, uniform, batches and "
            "loss, which choose units themselves"
        )
    if projects and min_units != 1:
        raise ArgumentError(
            "with a budget, round_to or uniform each group keeps a block: leave min_units=1"
        )
    if (batches is None) != (loss is None):
        raise ArgumentError(
            "batches and loss belong together: with both, units are closed by their importance; "
            "with neither, by their gates"
        )
    if budget is not None and not isinstance(budget, MaskSource):
        raise ArgumentError(NOT_OF_THIS_MODEL)


def cut_and_verify(
    gated: GatedModel, values: Tensor, *, form: Form = "auto", min_units: int = 1
) -> nn.Module:
    """A plain, smaller model with the outputs of the gated one for these values of its gates."""
    dense = dense_model(gated)
    plain = plain_copy(dense, shared=dense.parameters())
    of_dense = dense_values(gated, values)
    plan = make_plan(dense, plain, min_units=min_units, may_empty=True, values=of_dense)
    reference: Any = detached_copy(gated, gated.parameters())
    failures = []
    with reference.gates.holding(None, values):
        for candidate in _candidates(plan, plain, form):
            small, failure = _attempt(candidate, plain, reference.model, gated.example)
            if small is not None:
                warn_of_idle_sites(dense, of_dense, plan, dense.analyze(plain), stacklevel=4)
                return small
            failures.append(f"as {candidate.form}: {failure}")
    hint = ". Ask for form='auto' to allow the graph form" if form == "module" else ""
    why = "; ".join(dict.fromkeys(failures))
    raise CompactionError(f"{type(plain).__name__} could not be made small. {why}{hint}")


def _warn_of_collapse(gated: GatedModel) -> None:
    keeps_one = any(group.keeps_one for group in gated.groups)
    if keeps_one and not gated.gates.readout().any():
        warnings.warn(
            "no gate is open: the network has collapsed, and the units that stay were not trained",
            HardConcreteWarning,
            stacklevel=3,
        )


def _candidates(plan: CompactionPlan, plain: nn.Module, form: Form) -> Iterator[CompactionPlan]:
    """The plan as a module, with new values of attributes, and as a graph for any size or one."""
    if form != "graph":
        plans, first = plans_with_numbers(replace(plan, form="module"), plain)
        yield from plans
        for guess in size_guesses(plan, plain):
            yield replace(first, attributes={**first.attributes, **guess})
    if form != "module":
        yield replace(plan, form="graph")
        yield replace(plan, form="graph", fixed_sizes=True)


def _attempt(
    plan: CompactionPlan, plain: nn.Module, reference: nn.Module, example: Any
) -> tuple[nn.Module | None, str]:
    """A small model if its outputs are the same; else the reason."""
    try:
        small = plan.apply(plain, *example)
        gap = max(
            difference(reference, each, example) for each in (small, *_built_again(plan, small))
        )
    except Exception as error:  # a forward may fail in any way
        return None, in_one_line(error)
    if gap <= 1:
        return small, ""
    where = first_difference(reference, small, example)
    return None, f"its outputs differ by {gap:.3g} times what is tolerated ({where})"


def _built_again(plan: CompactionPlan, small: nn.Module) -> Iterator[nn.Module]:
    """The small model, each module built by its class from a configuration that describes it."""
    for path, configuration in plan.configurations.items():
        if configuration.is_complete:
            module_path, _, attribute = path.rpartition(".")
            with module_rebuilt(small, module_path, attribute) as model:
                yield model
