"""What a model looked like when it was traced: equal fingerprints, equal graphs."""

import functools
import types
import weakref
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.graph.propagate import first_names, named_tensors

Simple = bool | int | float | str | bytes | None | torch.dtype | torch.device | Enum | slice
Code = type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType
"""What a copy of a model shares with it."""

HEAP_TYPE = 1 << 9
"""Flag of classes that a ``class`` statement made (Py_TPFLAGS_HEAPTYPE)."""

Seen = dict[int, tuple[Any, Any]]
"""Each value by its id, with its fingerprint. The reference keeps the id from being used again."""

SKIPPED = (
    "training", "_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""Attributes of modules that are compared elsewhere, or that do not change the forward."""


def fingerprint(model: nn.Module) -> Any:
    """Classes, settings and tensors of a model, without the numbers in the tensors.

    Settings are all attributes of modules and what they contain: lists, dicts, configurations,
    hooks. A value that cannot be compared equals nothing. What a forward reads from elsewhere, such
    as a global variable, is not part of it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> before = fingerprint(model)
        >>> fingerprint(model) == before
        True
        >>> model[1] = nn.Linear(3, 5)
        >>> fingerprint(model) == before
        False
    """
    seen: Seen = {}
    modules = [
        (path, type(m), {k: _value(v, seen) for k, v in vars(m).items() if k not in SKIPPED})
        for path, m in model.named_modules(remove_duplicate=False)
    ]
    tensors = named_tensors(model)
    kinds = [(name, _value(tensor, seen)) for name, tensor in tensors.items()]
    devices = {tensor.device.type for tensor in tensors.values()} - {"meta"}
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in devices
    }
    return modules, kinds, first_names(model), casts


def fingerprint_of_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Shapes, types and devices of the tensors among inputs, and all other values."""
    return _value([args, dict(kwargs)], {})


def _value(value: Any, seen: Seen) -> Any:
    """Something that is equal for equal values."""
    if isinstance(value, Simple):
        return value
    if isinstance(value, Code):
        return weakref.ref(value)  # a closure may hold the model
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, weakref.ref):
        return weakref.ref
    if id(value) not in seen:
        seen[id(value)] = value, type(value)  # where it contains itself
        seen[id(value)] = value, (type(value), _parts(value, seen))
    return seen[id(value)][1]


def _parts(value: Any, seen: Seen) -> Any:
    if isinstance(value, Mapping):
        return [
            *((_value(key, seen), _value(part, seen)) for key, part in value.items()),
            _attributes(value, seen),
        ]
    if isinstance(value, list | tuple):
        return [*(_value(part, seen) for part in value), _attributes(value, seen)]
    if isinstance(value, set | frozenset):
        return frozenset(value) if all(isinstance(part, Simple) for part in value) else object()
    if isinstance(value, functools.partial):
        return [_value(part, seen) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType):
        owner = value.__self__
        part = type(owner) if isinstance(owner, nn.Module) else owner  # modules are compared above
        return _value(value.__func__, seen), _value(part, seen)
    if hasattr(value, "__dict__") and _has_only_attributes(type(value)):
        return _attributes(value, seen)
    return object()


def _attributes(value: Any, seen: Seen) -> Any:
    return {name: _value(part, seen) for name, part in getattr(value, "__dict__", {}).items()}


def _has_only_attributes(kind: type) -> bool:
    """Whether nothing is hidden in slots, or in a class that is not written in Python."""
    return kind is types.SimpleNamespace or all(
        base is object or (base.__flags__ & HEAP_TYPE and not vars(base).get("__slots__"))
        for base in kind.__mro__
    )
