"""Which models a plan is for: those with its tensors, in its sizes, in modules of its classes."""

import hashlib
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from hardconcrete.compaction.attention_heads import has_fewer_heads
from hardconcrete.errors import CompactionError
from hardconcrete.units.configuration import Shapes, shapes_of

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan


def classes_of(model: nn.Module) -> str:
    """A digest of the classes of all modules and their paths."""
    lines = [f"{path} {_class_name(module)}" for path, module in model.named_modules()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _class_name(module: nn.Module) -> str:
    """Of attention with fewer heads the name of torch's class."""
    kind: Any = type(module)
    return str((kind.base if has_fewer_heads(module) else kind).__name__)


def refuse_another_architecture(plan: "CompactionPlan", model: nn.Module) -> None:
    """Refuse a model without a tensor or a module of the plan, or with another size."""
    shapes = shapes_of(model)
    wanted = [(cut.tensor, cut.dim, cut.size) for cut in plan.cuts]
    wanted += [(s.parameter, s.dim, len(s.values)) for s in plan.scales if s.dim is not None]
    for name, dim, size in wanted:
        shape = shapes.get(name, ())
        if dim >= len(shape) or shape[dim] != size:
            raise CompactionError(
                f"the plan is for another architecture: its {name} has the size {size} along "
                f"dimension {dim}, and here {_shape_in_words(shapes, name)}"
            )
    for scale in plan.scales:
        if scale.dim is None and prod(shapes.get(scale.parameter, (0,))) != len(scale.values):
            raise CompactionError(
                f"the plan is for another architecture: its {scale.parameter} has "
                f"{len(scale.values)} entries, and here {_shape_in_words(shapes, scale.parameter)}"
            )
    if plan.modules not in ("", classes_of(model)):
        raise CompactionError(
            "the plan is for another architecture: modules here are of other classes than in the "
            "plan"
        )
    for path in (*plan.selections, *(name.rpartition(".")[0] for name in plan.attributes)):
        if path and not _has(model, path):
            raise CompactionError(
                f"the plan is for another architecture: here is no module {path!r}"
            )


def _has(model: nn.Module, path: str) -> bool:
    """Whether a module is there, or a configuration of one."""
    try:
        attrgetter(path)(model)
    except AttributeError:
        return False
    return True


def _shape_in_words(shapes: Shapes, name: str) -> str:
    return f"it has the shape {list(shapes[name])}" if name in shapes else "is no such tensor"
