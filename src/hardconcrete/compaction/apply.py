"""A plan applied to a dense model, in the form that it names."""

from math import prod
from typing import Any

from torch import nn

from hardconcrete.compaction.graph_form import cut_graph
from hardconcrete.compaction.module_form import cut_copy
from hardconcrete.compaction.plan import KEY, CompactionPlan, classes_of
from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.gating.class_swap import is_swapped
from hardconcrete.graph.propagate import named_tensors
from hardconcrete.graph.trace import as_args


def apply_plan(
    plan: CompactionPlan, model: nn.Module, example_inputs: Any = None, kwargs: Any = None
) -> nn.Module:
    """A small model that carries its plan."""
    if any(is_swapped(module) for module in model.modules()):
        raise ArgumentError(
            "a plan applies to a dense model, and this one has gates: hc.remove_gates(gated) first"
        )
    _refuse_another_architecture(plan, model)
    if plan.form == "graph":
        if example_inputs is None:
            raise ArgumentError(
                "this plan is in graph form: the dense model is traced again, so example_inputs "
                "are needed"
            )
        small = cut_graph(plan, model, (as_args(example_inputs), dict(kwargs or {})))
    else:
        small = cut_copy(plan, model)
    before = model.__dict__.get(KEY)
    if isinstance(before, CompactionPlan) and _is_result(model, before):
        plan = plan.after(before)
    small.__dict__[KEY] = plan
    return small


def _is_result(model: nn.Module, plan: CompactionPlan) -> bool:
    """Whether a model is what a plan gave, and its layers were not changed since."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    return plan.modules == classes_of(model) and all(
        cut.tensor in shapes and shapes[cut.tensor][cut.dim] == len(cut.kept) for cut in plan.cuts
    )


def _refuse_another_architecture(plan: CompactionPlan, model: nn.Module) -> None:
    """Everything that the plan names is there, in the size that it had."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    wanted = [(cut.tensor, cut.dim, cut.size) for cut in plan.cuts]
    wanted += [(s.parameter, s.dim, len(s.values)) for s in plan.scales if s.dim is not None]
    for name, dim, size in wanted:
        found = shapes.get(name, ())
        if dim >= len(found) or found[dim] != size:
            raise CompactionError(
                f"the plan is for another architecture: its {name} has the size {size} along "
                f"dimension {dim}, and here {_found(shapes, name)}"
            )
    for scale in plan.scales:
        if scale.dim is None and prod(shapes.get(scale.parameter, (0,))) != len(scale.values):
            raise CompactionError(
                f"the plan is for another architecture: its {scale.parameter} has "
                f"{len(scale.values)} entries, and here {_found(shapes, scale.parameter)}"
            )
    if plan.modules not in ("", classes_of(model)):
        raise CompactionError(
            "the plan is for another architecture: modules here are of other classes than its own"
        )
    paths = dict(model.named_modules(remove_duplicate=False)).keys()
    for path in (*plan.selections, *(name.rpartition(".")[0] for name in plan.attributes)):
        if path not in paths:
            raise CompactionError(
                f"the plan is for another architecture: here is no module {path!r}"
            )


def _found(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"it has the shape {list(shapes[name])}" if name in shapes else "is no such tensor"
