"""Layers with another forward that stay instances of their class."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

SwappedForward = Callable[..., Any]
"""A forward of a layer, with the layer as its first argument."""


def swap_forward(module: nn.Module, prefix: str, forward: SwappedForward) -> None:
    """Give a module another forward, in place. Copies and pickles keep it."""
    kind: Any = type(module)
    module.__class__ = _subclass(kind, prefix, forward)


@cache
def _subclass(base: Any, prefix: str, forward: SwappedForward) -> Any:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001
        return _revive, (base, prefix, forward), self.__getstate__()

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__, "base": base}
    members["made_by"] = _subclass, base, prefix, forward  # to make it again: no module names it
    return type(f"{prefix}{base.__name__}", (base,), members)


def _revive(base: Any, prefix: str, forward: SwappedForward) -> nn.Module:
    kind: Any = _subclass(base, prefix, forward)
    made: nn.Module = kind.__new__(kind)
    return made
