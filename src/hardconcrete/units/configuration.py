"""The object that a module is built from, such as ``model.config``, and what its numbers do.

A class that takes such an object as its only argument shows what each number does: built again
with another number, its tensors have other shapes.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hardconcrete.graph.model_state import random_state_kept
from hardconcrete.graph.propagate import named_tensors

HEAD_SIZE = "head_dim"
"""What a configuration calls the size of a head that does not follow from the width."""

Numbers = dict[str, int]
"""Numbers of a configuration by name, with dots for an object inside it."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

Places = set[tuple[str, int]]
"""Dimensions of tensors."""


def shapes_of(model: nn.Module) -> Shapes:
    """The shape of every parameter and buffer, under each of its names."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


def configurations_in(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The modules whose class takes one argument, with an attribute that may be that argument.

    Yields the path of the module, the name of the attribute and the object.
    """
    for path, module in model.named_modules():
        if _takes_one_argument(type(module)):
            for name, value in vars(module).items():
                if is_configuration(value):
                    yield path, name, value


def is_configuration(value: Any) -> bool:
    """Whether an object holds numbers by name and is neither a module nor a function."""
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return False
    return any(type(number) is int for number in getattr(value, "__dict__", {}).values())


def _takes_one_argument(kind: type[nn.Module]) -> bool:
    if kind.__module__.startswith("torch."):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    required = [each for each in parameters if each.default is inspect.Parameter.empty]
    required = [
        each for each in required if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return len(required) == 1 and required[0].kind in positional


def values_in(config: Any) -> dict[str, Any]:
    """Its public values, and those of the configurations inside it."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        values[name] = value
        if is_configuration(value):
            values |= {f"{name}.{inner}": each for inner, each in values_in(value).items()}
    return values


def set_number(config: Any, name: str, number: int) -> None:
    """Set a number of a configuration, which may be frozen."""
    *outer, last = name.split(".")
    for each in outer:
        config = getattr(config, each)
    vars(config)[last] = number


def build(module: nn.Module, config: Any, numbers: Mapping[str, int]) -> nn.Module:
    """A new module of the same class, from its configuration with other numbers.

    Its parameters are on the meta device; its buffers are real. A configuration that can be written
    to a file goes through that form, as it would on the way to another program.
    """
    changed = copy.deepcopy(config)
    for name, number in numbers.items():
        set_number(changed, name, number)
    kind: Any = type(changed)
    if hasattr(kind, "from_dict") and hasattr(kind, "to_dict"):
        changed = kind.from_dict(changed.to_dict())
    make: Any = type(module)
    with random_state_kept(), _parameters_on_meta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built: nn.Module = make(changed)
    return built


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built here have parameters without numbers, so that they cost nothing."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def built_shapes(module: nn.Module, config: Any, numbers: Mapping[str, int]) -> Shapes | None:
    """The shapes that the class builds with these numbers; None where it refuses them."""
    try:
        return shapes_of(build(module, config, numbers))
    except Exception:  # a constructor may fail in any way for numbers that do not fit
        return None


def moved_places(dense: Shapes, other: Shapes | None) -> Places:
    """The dimensions of other sizes; none where the tensors are not the same."""
    if other is None or other.keys() != dense.keys():
        return set()
    return {
        (name, dim)
        for name, shape in dense.items()
        for dim, (old, new) in enumerate(zip(shape, other[name], strict=False))
        if old != new
    }
