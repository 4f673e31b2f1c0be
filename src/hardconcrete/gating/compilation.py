"""Compiled code: functions that it does not trace, and draws that it did not make.

Compiled code reads the draw that is held when it runs, in forwards and in recomputations alike. An
operation that the compiler does not trace checks whether it is the right one.
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
"""Names of functions that compiled code does not trace."""
_AUTOCAST = [f"torch.amp.autocast_mode._{way}_autocast" for way in ("enter", "exit")]
"""Functions of torch that its cache does not know; their arguments are part of the graph."""
_MARKED = "unsafe_marked_cacheable_functions"

_LIBRARY = torch.library.Library("hardconcrete", "FRAGMENT")
_LIBRARY.define(
    "check_draw(Tensor z, int draws, bool frozen, bool lost) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),  # a replay would not ask
)


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Let compiled code call a function of tensors and numbers without tracing it.

    Compiled code checks every name that it has traced before each call, which can take longer than
    the function itself. The price: a new process takes the kernels of such code from torch's cache,
    and differentiates the code again, unless ``cacheable`` is an option of ``torch.compile``.
    """
    _IN_GRAPH.append(f"{function.__module__}.{function.__qualname__}")
    return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return]


def cacheable() -> dict[str, Any]:
    """Options with which torch's cache on disk keeps compiled code that calls such functions.

    The cache cannot compare functions that were not traced, so it gets a digest of the source code.
    Without source code the options are empty, and every process compiles such code again.

    Example:
        >>> next(iter(cacheable().values())).keys() >= {"hardconcrete.gating.bank._open"}
        True
    """
    from torch._inductor import config

    if not _SOURCE or not hasattr(config, _MARKED):  # torch may have another name for it some day
        return {}
    return {_MARKED: dict.fromkeys([*_IN_GRAPH, *_AUTOCAST], _SOURCE)}


def _digest(package: Path) -> str:
    """A digest of all source files below a folder; empty where there are none, as in an archive."""
    files = sorted(file for file in package.rglob("*.py") if file.is_file())
    text = [(file.relative_to(package).as_posix(), file.read_bytes()) for file in files]
    return hashlib.sha256(repr(text).encode()).hexdigest() if text else ""


_SOURCE = _digest(Path(__file__).parents[1])  # now, before it changes


def check_draw(z: Tensor, draws: int, frozen: bool, lost: bool) -> Tensor:
    """1 where z is the draw that the running code has to see; else refuse.

    Args:
        z: the draw that is held, without its gradient.
        draws: the number of its ``Draws``.
        frozen: whether the gates are frozen.
        lost: whether a reentrant checkpoint would lose the gradients of z here.
    """
    one: Tensor = torch.ops.hardconcrete.check_draw(z, draws, frozen, lost)
    return one


@torch.library.impl(_LIBRARY, "check_draw", "CompositeExplicitAutograd")
def _check_draw(z: Tensor, draws: int, frozen: bool, lost: bool) -> Tensor:
    if lost:
        refuse_reentrant()
    if draws in Draws.numbered:  # else the model was deleted
        Draws.numbered[draws].refuse_other(z, frozen)
    return z.new_ones(())


@torch.library.register_fake("hardconcrete::check_draw", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shaped(z: Tensor, draws: int, frozen: bool, lost: bool) -> Tensor:  # noqa: ARG001
    return z.new_empty(())
