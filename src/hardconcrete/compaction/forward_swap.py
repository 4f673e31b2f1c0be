"""Layers that compute otherwise than their class does, and are still of that class."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Tensor]


def swap_forward(module: nn.Module, prefix: str, forward: Forward) -> None:
    """Give a module another forward, in place; copies and pickles keep it."""
    kind: Any = type(module)
    module.__class__ = _variant(kind, prefix, forward)


@cache
def _variant(base: Any, prefix: str, forward: Forward) -> Any:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001
        return _revive, (base, prefix, forward), self.__getstate__()

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__, "base": base}
    members["made_by"] = _variant, base, prefix, forward  # how to have it again: it has no name
    return type(f"{prefix}{base.__name__}", (base,), members)


def _revive(base: Any, prefix: str, forward: Forward) -> nn.Module:
    kind: Any = _variant(base, prefix, forward)
    made: nn.Module = kind.__new__(kind)
    return made
