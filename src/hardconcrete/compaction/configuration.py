"""The object that a model is built from, such as ``model.config``, with the sizes of a small model.

A class that takes such an object as its only argument shows what each number does: built again
with another number, its tensors have other shapes.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import CompactionError
from hardconcrete.graph.model_state import random_state_kept

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan

Numbers = dict[str, int]
"""Numbers of a configuration by name, with dots for an object inside it."""


@dataclass(frozen=True)
class Configuration:
    """The new numbers of a configuration.

    Args:
        numbers: by name: ``intermediate_size``, or ``text_config.intermediate_size``.
        is_complete: whether the class of its module builds the small module from it.
    """

    numbers: Mapping[str, int]
    is_complete: bool = False


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


def rebuilt(module: nn.Module, config: Any) -> nn.Module:
    """The module as its class builds it from its configuration, with the tensors of this one."""
    made = build(module, config, {})
    made.load_state_dict(module.state_dict(keep_vars=True), assign=True)
    known = dict(module.named_buffers())
    with torch.no_grad():
        for name, buffer in made.named_buffers():
            if name in known:
                buffer.data = buffer.to(known[name])
    return made.train(module.training)


@contextmanager
def module_rebuilt(model: nn.Module, path: str, attribute: str) -> Iterator[nn.Module]:
    """The model, one of its modules as its class builds it from its configuration."""
    module = model.get_submodule(path)
    made = rebuilt(module, getattr(module, attribute))
    if not path:
        yield made
        return
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, made)
    try:
        yield model
    finally:
        setattr(model.get_submodule(parent), name, module)


def set_numbers(plan: "CompactionPlan", model: nn.Module) -> None:
    """Set the numbers of a plan in a model's configurations, also in copies that modules keep."""
    for path, configuration in plan.configurations.items():
        module_path, _, attribute = path.rpartition(".")
        module = model.get_submodule(module_path)
        config = getattr(module, attribute)
        old = values_in(config)
        nodes = {"": config, **{k: v for k, v in old.items() if is_configuration(v)}}
        for name, number in configuration.numbers.items():
            outer, _, last = name.rpartition(".")
            for copied in _copies(module, nodes[outer], list(nodes.values())):
                if vars(copied).get(last) == old.get(name):
                    vars(copied)[last] = number
            set_number(config, name, number)


def _copies(module: nn.Module, config: Any, known: list[Any]) -> Iterator[Any]:
    """Other configurations of the same class inside a module."""
    for inner in module.modules():
        for value in vars(inner).values():
            if type(value) is type(config) and not any(value is each for each in known):
                yield value


class NoPretrainedFile:
    """Stands for ``save_pretrained`` of a model that its configuration does not describe."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, *_: Any, **__: Any) -> None:
        """Refuse to write a file that would open as another model."""
        raise CompactionError(
            f"save_pretrained writes no sizes beside the configuration, and the configuration of "
            f"this {self.model} cannot describe its layers, so from_pretrained would build another "
            "model. Use hc.save and hc.load. hc.compact(..., uniform=True) and hc.prune(..., "
            "uniform=True) keep equally many units in all layers, which most configurations can "
            "describe; docs/models.md says which"
        )


def refuse_files(plan: "CompactionPlan", model: nn.Module) -> None:
    """Let ``save_pretrained`` refuse where a configuration does not describe its cut module."""
    complete = [
        path.rpartition(".")[0]
        for path, configuration in plan.configurations.items()
        if configuration.is_complete
    ]
    for path, module in model.named_modules():
        described = any(f"{path}.".startswith(f"{each}.") or not each for each in complete)
        is_cut = any(cut.tensor.startswith(f"{path}." if path else "") for cut in plan.cuts)
        if is_cut and not described and hasattr(module, "save_pretrained"):
            vars(module)["save_pretrained"] = NoPretrainedFile(type(module).__name__)
