"""One look at a model, kept: what was found in its graph serves while the model is the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hardconcrete.structure.trace import trace
from hardconcrete.structure.walk import Walk, first_names, named_tensors, walk

Simple = bool | int | float | str | None


@dataclass(frozen=True, eq=False)
class Look:
    """What was found in a model, and how it looked then. All copies of a model share it.

    Args:
        walk: what was found.
        seen: classes, settings and tensors of the model, but for their numbers.
    """

    walk: Walk
    seen: Mapping[str, Any]

    @classmethod
    def at(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> "Look":
        """Trace a model, in evaluation mode, and walk over its graph."""
        graph = trace(model, args, kwargs)
        found = walk(graph, model)
        graph.graph.owning_module = None  # which has the model's parameters: they shall not stay
        return cls(found, _seen(model))

    def fits(self, model: nn.Module) -> bool:
        """Whether a model still has these classes and settings, and such tensors, tied alike.

        Example:
            >>> import torch
            >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            >>> look = Look.at(model, (torch.zeros(2, 4),))
            >>> look.fits(model)
            True
            >>> model[1] = nn.Linear(3, 5)
            >>> look.fits(model)
            False
        """
        return _seen(model) == self.seen


def _seen(model: nn.Module) -> dict[str, Any]:
    modules = {
        path: (type(module), _settings(module))
        for path, module in model.named_modules(remove_duplicate=False)
    }
    tensors = named_tensors(model)
    kinds = {name: (t.shape, t.dtype, t.device) for name, t in tensors.items()}
    return {"modules": modules, "tensors": kinds, "tied": first_names(model)}


def _settings(module: nn.Module) -> dict[str, Any]:
    """What its forward may decide by: numbers, words and tuples or lists of these."""
    own = {name: value for name, value in vars(module).items() if name != "training"}
    lists = {name: tuple(v) for name, v in own.items() if isinstance(v, tuple | list)}
    simple = {name: v for name, v in own.items() if isinstance(v, Simple)}
    return simple | {name: v for name, v in lists.items() if all(isinstance(x, Simple) for x in v)}
