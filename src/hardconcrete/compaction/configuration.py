"""``model.config``, or whatever a model is built from, with the sizes of the small model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hardconcrete.errors import CompactionError
from hardconcrete.units.configuration import build, is_configuration, set_number, values_in

if TYPE_CHECKING:
    from hardconcrete.compaction.plan import CompactionPlan


@dataclass(frozen=True)
class Configuration:
    """The new numbers of a configuration.

    Args:
        numbers: by name: ``intermediate_size``, or ``text_config.intermediate_size``.
        not_described: names of tensors to which the class of its module gives another shape. There
            are none where it builds the small module from its configuration.
    """

    numbers: Mapping[str, int]
    not_described: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the class builds the small module from it."""
        return not self.not_described


def rebuilt(module: nn.Module, config: Any) -> nn.Module:
    """The module as its class builds it from its configuration, with the tensors of this one."""
    made = build(module, config, {})
    made.load_state_dict(module.state_dict(), assign=True)
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

    def __init__(self, model: str, tensor: str) -> None:
        self.model, self.tensor = model, tensor

    def __call__(self, *_: Any, **__: Any) -> None:
        """Refuse to write a file that would open as another model."""
        raise CompactionError(
            f"save_pretrained would write a {self.model} that from_pretrained cannot open: its "
            f"configuration does not describe {self.tensor} and perhaps others. Use hc.save and "
            "hc.load. Or keep equally many units in all layers with uniform=True, and leave out "
            "with exclude=... what a configuration of this class cannot describe (docs/models.md)"
        )


def refuse_files(plan: "CompactionPlan", model: nn.Module) -> None:
    """Let ``save_pretrained`` refuse where a configuration does not describe its cut module."""
    names = [cut.tensor for cut in plan.cuts]
    for path, configuration in plan.configurations.items():
        prefix = path[: path.rfind(".") + 1]
        others = {f"{prefix}{name}" for name in configuration.not_described}
        names = [name for name in names if not name.startswith(prefix) or name in others]
    for path, module in model.named_modules():
        inside = [name for name in names if name.startswith(f"{path}." if path else "")]
        if inside and hasattr(module, "save_pretrained"):
            vars(module)["save_pretrained"] = NoPretrainedFile(type(module).__name__, inside[0])
