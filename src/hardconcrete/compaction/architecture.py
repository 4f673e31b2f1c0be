"""Which models a plan is for: those with its tensors, in its sizes, in modules of its classes."""

import hashlib
from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hardconcrete.compaction.attention_heads import has_fewer_heads
from hardconcrete.errors import CompactionError
from hardconcrete.units.configuration import (
    HEAD_SIZE,
    Shapes,
    is_configuration,
    shapes_of,
    values_in,
)

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan


SIZES_OF_NORMS = ("num_features", "num_channels", "num_groups")
"""What torch calls the sizes of norms, which may have no tensors to take them from."""


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
    holders = {path: _holder(model, path) for path in _paths(plan)}
    for path, holder in holders.items():
        if holder is None:
            raise CompactionError(
                f"the plan is for another architecture: here is no module {path!r}"
            )
    for path, kept in plan.selections.items():
        _refuse_selection(path, holders[path], kept)
    for name, size in plan.attributes.items():
        path, _, attribute = name.rpartition(".")
        number = size_attributes(holders[path]).get(attribute, -1)
        _refuse_number(name, number, size)
    for path, configuration in plan.configurations.items():
        numbers = values_in(holders[path]) if is_configuration(holders[path]) else {}
        for name, size in configuration.numbers.items():
            is_head_size = name.rpartition(".")[2] == HEAD_SIZE
            before = numbers.get(name, None if is_head_size else -1)
            if before is None:  # it follows from others: no larger than a tensor
                before = max(chain.from_iterable(shapes.values()), default=0)
            _refuse_number(f"{path}.{name}", before, size)


def _paths(plan: "CompactionPlan") -> Iterator[str]:
    """What a plan names: modules, and configurations of modules."""
    yield from plan.selections
    yield from (name.rpartition(".")[0] for name in plan.attributes)
    yield from plan.configurations


def _holder(model: nn.Module, path: str) -> Any:
    """The module or configuration at a path; None if there is none."""
    holder: Any = model
    for part in path.split(".") if path else ():
        holder = getattr(holder, part, None)
        if not isinstance(holder, nn.Module) and not is_configuration(holder):
            return None
    return holder


def size_attributes(holder: Any) -> dict[str, int]:
    """The attributes of a module or a configuration that may be sizes: its own integers.

    A layer of torch takes its sizes from its tensors. A norm without tensors has its own.
    """
    integers = {
        name: value
        for name, value in vars(holder).items()
        if type(value) is int and not name.startswith("_")
    }
    if not type(holder).__module__.startswith("torch.nn"):
        return integers
    return {name: size for name, size in integers.items() if name in SIZES_OF_NORMS}


def _refuse_number(name: str, before: Any, after: int) -> None:
    if type(before) is not int or not after <= before:
        raise CompactionError(
            f"the plan is for another architecture: it sets {name} to {after}, and only an "
            "integer of a module that is at least as large can become smaller"
        )


def _refuse_selection(path: str, module: Any, kept: tuple[int, ...]) -> None:
    """Refuse a selection by a layer that has no such inputs."""
    weight = module.weight if isinstance(module, nn.Linear | _ConvNd) else None
    if not isinstance(weight, Tensor) or (kept and kept[-1] >= weight.shape[1]):
        raise CompactionError(
            f"the plan is for another architecture: {path} has no {len(kept)} inputs to select"
        )


def _shape_in_words(shapes: Shapes, name: str) -> str:
    return f"it has the shape {list(shapes[name])}" if name in shapes else "is no such tensor"
