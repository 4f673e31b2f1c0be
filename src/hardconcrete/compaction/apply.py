"""A plan applied to a dense model, in the form that it names."""

from typing import Any

from torch import nn

from hardconcrete.compaction.plan import KEY, CompactionPlan
from hardconcrete.compaction.resize import resized
from hardconcrete.compaction.rewrite import rewritten
from hardconcrete.errors import ArgumentError
from hardconcrete.structure.trace import as_args


def applied(
    plan: CompactionPlan, model: nn.Module, example_inputs: Any = None, kwargs: Any = None
) -> nn.Module:
    """A small model that carries its plan."""
    if plan.form == "graph":
        if example_inputs is None:
            raise ArgumentError(
                "this plan is in graph form: the dense model is traced again, so example_inputs "
                "are needed"
            )
        small = rewritten(plan, model, (as_args(example_inputs), dict(kwargs or {})))
    else:
        small = resized(plan, model)
    small.__dict__[KEY] = plan
    return small
