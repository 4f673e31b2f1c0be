"""What compiled code sees: of functions, and of a draw that was made outside of it.

Such code reads whatever draw is held when it runs, in forwards and in recomputations alike, and
cannot ask which it is: an operation that the compiler does not look into asks for it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hardconcrete.gating.checkpointing import Draws, refuse_reentrant

P = ParamSpec("P")
R = TypeVar("R")

_IN_GRAPH: list[str] = []
"""Names of functions that compiled code does not look into."""
_AUTOCAST = [f"torch.amp.autocast_mode._{way}_autocast" for way in ("enter", "exit")]
"""Torch's own, whose cache does not know them; all that they depend on stands beside them."""
_MARKED = "unsafe_marked_cacheable_functions"

_LIBRARY = torch.library.Library("hardconcrete", "FRAGMENT")
_LIBRARY.define(
    "if_own(Tensor z, int draws, bool frozen, bool lost) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),  # a replay would not ask
)


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors and numbers that compiled code computes without looking into it.

    Whatever was looked into, down to each name, is checked again before every call of such code,
    which can take longer than the function itself. The price: a new process finds the kernels of
    such code in torch's cache, and has to differentiate it again, unless ``cacheable`` is an option
    of ``torch.compile``.
    """
    _IN_GRAPH.append(f"{function.__module__}.{function.__qualname__}")
    return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return]


def cacheable() -> dict[str, Any]:
    """Options with which torch's cache on disk keeps compiled code that has such functions in it.

    What it does not look into it cannot know again: it is told a digest of all that it might be.
    Empty, and such code is compiled anew by every process, where that is not known.

    Example:
        >>> next(iter(cacheable().values())).keys() >= {"hardconcrete.gating.bank._open"}
        True
    """
    from torch._inductor import config

    if not _SOURCE or not hasattr(config, _MARKED):  # torch may have another name for it some day
        return {}
    return {_MARKED: dict.fromkeys([*_IN_GRAPH, *_AUTOCAST], _SOURCE)}


def _digest(package: Path) -> str:
    """Of all source files below a folder, or nothing where there are none, as in an archive."""
    files = sorted(file for file in package.rglob("*.py") if file.is_file())
    text = [(file.relative_to(package).as_posix(), file.read_bytes()) for file in files]
    return hashlib.sha256(repr(text).encode()).hexdigest() if text else ""


_SOURCE = _digest(Path(__file__).parents[1])  # now, before it changes


def if_own(z: Tensor, draws: int, frozen: bool, lost: bool) -> Tensor:
    """1 where z is the draw that what runs now has to see; refused otherwise.

    Args:
        z: the draw that is held, without its gradient.
        draws: the number of what knows the others.
        frozen: whether the gates are.
        lost: whether gradients of z would be, if this is the forward of a reentrant checkpoint.
    """
    one: Tensor = torch.ops.hardconcrete.if_own(z, draws, frozen, lost)
    return one


@torch.library.impl(_LIBRARY, "if_own", "CompositeExplicitAutograd")
def _asked(z: Tensor, draws: int, frozen: bool, lost: bool) -> Tensor:
    if lost:
        refuse_reentrant()
    if draws in Draws.numbered:  # else the model is gone, and holds nothing
        Draws.numbered[draws].refuse_other(z, frozen)
    return z.new_ones(())


@torch.library.register_fake("hardconcrete::if_own", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shaped(z: Tensor, draws: int, frozen: bool, lost: bool) -> Tensor:  # noqa: ARG001
    return z.new_empty(())
