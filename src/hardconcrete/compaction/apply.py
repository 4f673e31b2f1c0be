"""A plan applied to a dense model, in the form that it names."""

from typing import TYPE_CHECKING, Any

from torch import nn

from hardconcrete.compaction.architecture import refuse_another_architecture
from hardconcrete.compaction.graph_form import cut_graph
from hardconcrete.compaction.module_form import cut_copy
from hardconcrete.compaction.plan_values import refuse_bad_values
from hardconcrete.compaction.verify import in_one_line
from hardconcrete.errors import ArgumentError, CompactionError, HardConcreteError
from hardconcrete.gating.class_swap import is_swapped
from hardconcrete.graph.example_inputs import as_inputs

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan


def apply_plan(
    plan: "CompactionPlan", model: nn.Module, example_inputs: Any = None, kwargs: Any = None
) -> nn.Module:
    """A small copy of a model; ``CompactionPlan.apply`` puts the plan on it."""
    _refuse_bad_model(model)
    refuse_bad_values(plan)
    refuse_another_architecture(plan, model)
    if plan.form == "graph" and example_inputs is None and kwargs is None:
        raise ArgumentError(
            "this plan is in graph form: the dense model is traced again, so example_inputs are "
            "needed"
        )
    try:
        if plan.form == "module":
            return cut_copy(plan, model)
        return cut_graph(plan, model, as_inputs(example_inputs, kwargs))
    except HardConcreteError:
        raise
    except Exception as error:  # a plan whose cuts do not belong together fails in any layer
        raise CompactionError(
            f"the plan cannot be applied to this {type(model).__name__}: {in_one_line(error)}"
        ) from error


def _refuse_bad_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a plan applies to a dense model, not to a {type(model).__name__}")
    if any(is_swapped(module) for module in model.modules()):
        raise ArgumentError(
            "a plan applies to a dense model, and this one has gates: hc.remove_gates(gated) first"
        )
