"""One look at a model, kept: what was found in its graph serves while the model is the same."""

import functools
import types
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.graph.propagate import LabelledGraph, first_names, named_tensors, propagate
from hardconcrete.graph.trace import trace

Simple = bool | int | float | str | bytes | None | torch.dtype | torch.device | Enum | slice
Code = type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType
"""What a copy of a model shares with it."""

Told = dict[int, tuple[Any, Any]]
"""By its number a value, which is thereby kept, and what is told of it."""

OWN = (
    "training", "_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""What is told of a module otherwise, or does not matter here, as what saves and loads it."""


@dataclass(frozen=True, eq=False)
class TraceCache:
    """What was found in a model, and how it looked then. All copies of a model share it.

    Args:
        walk: what was found.
        seen: classes, settings and tensors of the model, but for their numbers.
    """

    walk: LabelledGraph
    seen: Any

    @classmethod
    def at(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> "TraceCache":
        """Trace a model, in evaluation mode, and walk over its graph."""
        graph = trace(model, args, kwargs)
        with torch.inference_mode(False), _on_the_cpu():  # it will be used elsewhere
            found = propagate(graph, model)
        graph.graph.owning_module = None  # which has the model's parameters: they shall not stay
        return cls(found, _seen(model))

    def fits(self, model: nn.Module) -> bool:
        """Whether a model still has these modules, settings and tensors, tied alike.

        Settings are all attributes of modules, and what is inside: lists, dicts, configurations,
        hooks. Where one cannot be compared, nothing fits. What a forward takes from elsewhere, a
        global variable perhaps, is not seen.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            >>> look = Look.at(model, (torch.zeros(2, 4),))
            >>> look.fits(model)
            True
            >>> model[1] = nn.Linear(3, 5)
            >>> look.fits(model)
            False
        """
        return bool(_seen(model) == self.seen)


def _on_the_cpu() -> AbstractContextManager[object]:
    """Where tensors are made; without a switch, which every operator would pass, if it is so."""
    device = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == device else device


def _seen(model: nn.Module) -> Any:
    told: Told = {}
    modules = [
        (path, type(module), {k: _told(v, told) for k, v in vars(module).items() if k not in OWN})
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    tensors = named_tensors(model)
    kinds = [(name, _told(tensor, told)) for name, tensor in tensors.items()]
    devices = {tensor.device.type for tensor in tensors.values()} - {"meta"}
    casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
             for kind in devices}  # fmt: skip
    return modules, kinds, first_names(model), casts


def _told(value: Any, told: Told) -> Any:
    """Something that is equal for equal values; for what cannot be compared, never."""
    if isinstance(value, Simple | Code):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, weakref.ref):
        return weakref.ref
    if id(value) not in told:
        told[id(value)] = value, type(value)  # where it contains itself
        told[id(value)] = value, (type(value), _parts(value, told))
    return told[id(value)][1]


def _parts(value: Any, told: Told) -> Any:
    if isinstance(value, Mapping):
        return [(_told(key, told), _told(part, told)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [_told(part, told) for part in value]
    if isinstance(value, set | frozenset):
        return frozenset(value) if all(isinstance(part, Simple) for part in value) else object()
    if isinstance(value, functools.partial):
        return [_told(part, told) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType):
        return value.__func__, type(value.__self__)
    if hasattr(value, "__dict__"):
        return {name: _told(part, told) for name, part in vars(value).items()}
    return object()
