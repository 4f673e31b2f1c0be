"""Which models a plan is for: those with its tensors, in its sizes, in modules of its classes."""

import hashlib
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hardconcrete.compaction.attention_heads import has_fewer_heads
from hardconcrete.errors import CompactionError
from hardconcrete.graph.propagate import named_tensors

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan

Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> Shapes:
    """The shape of every parameter and buffer, under each of its names."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


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
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in (*plan.selections, *(name.rpartition(".")[0] for name in plan.attributes)):
        if path not in modules:
            raise CompactionError(
                f"the plan is for another architecture: here is no module {path!r}"
            )
    for path, kept in plan.selections.items():
        _refuse_selection(path, modules[path], kept)
    for name, size in plan.attributes.items():
        path, _, attribute = name.rpartition(".")
        if not is_size_attribute(modules[path], attribute) or size > getattr(
            modules[path], attribute
        ):
            raise CompactionError(
                f"the plan is for another architecture: it sets {name} to {size}, and only an "
                "integer of a module that is at least as large can become smaller"
            )


def is_size_attribute(module: nn.Module, name: str) -> bool:
    """Whether an attribute of a module may be a size: an integer of its own, not one of torch.

    A layer of torch takes its sizes from its tensors. A norm without tensors has its own.
    """
    if name.startswith("_") or type(vars(module).get(name)) is not int:
        return False
    of_torch = type(module).__module__.startswith("torch.nn")
    return not of_torch or (isinstance(module, _NormBase) and name == "num_features")


def _refuse_selection(path: str, module: Any, kept: tuple[int, ...]) -> None:
    """Refuse a selection by a layer that has no such inputs."""
    weight = module.weight if isinstance(module, nn.Linear | _ConvNd) else None
    if not isinstance(weight, Tensor) or (kept and kept[-1] >= weight.shape[1]):
        raise CompactionError(
            f"the plan is for another architecture: {path} has no {len(kept)} inputs to select"
        )


def _shape_in_words(shapes: Shapes, name: str) -> str:
    return f"it has the shape {list(shapes[name])}" if name in shapes else "is no such tensor"
