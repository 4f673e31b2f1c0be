"""Which draw a recomputation in backward belongs to.

Activation checkpointing runs parts of a forward again while gradients are computed. The call that
drew the gates is over then, and others may have drawn since. Torch numbers the nodes of its graph
in the order in which they are made. A recomputation has to see the draw that was in force when the
node was made that is differentiated now.
"""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from itertools import count, pairwise
from operator import itemgetter
from threading import Thread, current_thread, get_ident
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import CheckpointFunction

from hardconcrete.errors import GateError

REENTRANT = (
    "reentrant activation checkpointing loses the gradients of the gates: use "
    "checkpoint(..., use_reentrant=False)"
)


def in_backward() -> bool:
    """Whether gradients are computed now, so that a forward here is a recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def loses_gradients(drawn: Tensor) -> bool:
    """Whether gradients are off here, though the draw has one."""
    return drawn.requires_grad and not torch.is_grad_enabled()


def refuse_reentrant() -> None:
    """Refuse a reentrant checkpoint: its forward loses the gradients of the gates.

    Where no input needs a gradient it is not even recomputed.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise GateError(REENTRANT)
        frame = frame.f_back


DrawReference = weakref.ref[Tensor] | None
"""A draw as long as its graph exists; None outside of calls, and for gates without gradients."""

MAX_TIMELINE_ENTRIES = 64
"""Entries of all timelines after which those without a graph are dropped."""


def refuse_inside_draw() -> None:
    """Refuse to recompute a call inside ``gated.draw()``: its forward may have had other gates."""
    if in_backward():
        raise GateError(
            "a call of the GatedModel is recomputed inside of gated.draw(): call backward after it"
        )


class Draws:
    """The draws of a bank, and which of them was in force when.

    A draw is forgotten with the graph that it is part of. Threads number their nodes separately, so
    each has a timeline. A node does not say which thread made it: where several draws are possible,
    none is taken.

    Attributes:
        number: of this object, for compiled code, which can hold a number.
        recorded_thread: the thread whose timeline ends with the draw that it holds.
    """

    numbered: ClassVar[weakref.WeakValueDictionary[int, "Draws"]] = weakref.WeakValueDictionary()
    """All objects by their numbers."""
    _numbers: ClassVar[Iterator[int]] = count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        Draws.numbered[self.number] = self
        self._threads: dict[Thread, _ThreadDraws] = {}
        self._max_entries = MAX_TIMELINE_ENTRIES
        self._recomputed: list[Tensor] = []
        self._untracked = False  # whether gates were drawn that neither learn nor are frozen
        self._shared = False  # whether a thread has read gates that another one drew
        self.recorded_thread: int | None = None

    @_disable_dynamo
    def enter(self, drawn: Tensor, frozen: bool) -> "_ThreadDraws | None":
        """Put a draw in force until the result is passed to ``leave``."""
        if in_backward():
            self._recomputed.append(self._checked(drawn, frozen))
            return None
        self._untracked |= not frozen and torch.is_grad_enabled() and drawn.grad_fn is None
        mine = self._threads.setdefault(current_thread(), _ThreadDraws())
        mine.held.append(drawn.detach())
        mine.calls.append(self._reference(drawn))
        mine.record(mine.now)
        self.recorded_thread = get_ident()
        return mine

    @_disable_dynamo
    def leave(self, mine: "_ThreadDraws | None") -> None:
        """Put the draw before it in force again."""
        if mine is None:
            self._recomputed.pop()
            return
        mine.held.pop()
        mine.calls.pop()
        mine.record(mine.now)
        self.recorded_thread = get_ident() if mine.calls else None
        self._forget()

    def _reference(self, drawn: Tensor) -> DrawReference:
        """Tie a draw to its node; under torch.func nothing is recomputed, and no leaf exists."""
        if drawn.grad_fn is None or torch._C._functorch.maybe_current_level() is not None:
            return None
        leaf = drawn.detach().requires_grad_()
        leaf.register_hook(_refuse_lost_gradient)
        drawn.grad_fn.metadata[self] = leaf  # type: ignore[index]  # declared as a method
        return weakref.ref(leaf)

    def _forget(self) -> None:
        """Of draws without a graph keep one in a row; drop threads that have no others."""
        if sum(len(each.timeline) for each in self._threads.values()) <= self._max_entries:
            return
        for thread, each in list(self._threads.items()):
            pairs = pairwise([(0, None), *each.timeline])
            each.timeline[:] = [b for a, b in pairs if _is_alive(a[1]) or _is_alive(b[1])]
            if not each.timeline and not each.calls:
                del self._threads[thread]
        entries = sum(len(each.timeline) for each in self._threads.values())
        self._max_entries = max(MAX_TIMELINE_ENTRIES, 2 * entries)

    @_disable_dynamo
    def record_again(self) -> None:
        """Record the draw in force again, because the timeline ends with another one."""
        mine = self._threads.get(current_thread())
        if mine is None or not mine.calls:
            self._shared = True
            return
        mine.record(mine.now)
        self.recorded_thread = get_ident()

    def refuse_other(self, z: Tensor, frozen: bool) -> None:
        """Refuse compiled code that recomputes with other gates than those of its forward.

        A compiled backward that recomputes by itself has saved them; they need not be held.
        """
        if not in_backward():
            if self.recorded_thread != get_ident():
                self.record_again()
            return
        held = [each for mine in list(self._threads.values()) for each in mine.held]
        if self._recomputed or not any(torch.equal(each, z) for each in held):
            return
        if not torch.equal(self._of_forward(False, z if frozen else None), z):
            raise GateError(
                "compiled layers are recomputed with other gates than in their forward: compile "
                "the checkpoint together with the layers in it"
            )

    @_disable_dynamo
    def recomputed(self, frozen: Tensor | None) -> Tensor:
        """The draw of the forward that is recomputed now; of frozen gates their values."""
        if self._recomputed:
            drawn = self._recomputed[-1]
        else:
            drawn = self._of_forward(ended=False, otherwise=frozen)
        mine = self._threads.get(current_thread())
        if mine is not None:  # nodes of the recomputation belong to no call, later ones do again
            mine.record(None)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: mine.record(mine.now))
        self.recorded_thread = None
        return drawn

    def _checked(self, drawn: Tensor, frozen: bool) -> Tensor:
        """The draw that a recomputation made itself; it must equal the draw of its forward."""
        if not frozen and not drawn.requires_grad:
            raise GateError(
                "a recomputation in backward draws gates without gradients, so that it cannot be "
                "compared with its forward: draw them outside of what is checkpointed, or use "
                "freeze_gates()"
            )
        first = self._of_forward(ended=True, otherwise=drawn if frozen else None)
        if not torch.equal(first, drawn):
            raise GateError(
                "a recomputation in backward drew other gates than its forward: checkpoint one "
                "call of the GatedModel at a time, with preserve_rng_state=True, without a "
                "generator, outside of gated.draw() and with backward before freeze_gates(); or "
                "checkpoint inside the model"
            )
        return first

    def _of_forward(self, ended: bool, otherwise: Tensor | None = None) -> Tensor:
        """The draw in force when the node was made that is differentiated now.

        Args:
            ended: also take a draw that was over by then.
            otherwise: the answer where no draw is possible, and none was untracked or shared.
        """
        node = torch._C._current_autograd_node()  # none where a backward is compiled
        threads = list(self._threads.values()) if node is not None else []
        possible = [each.at(node._sequence_nr(), ended) for each in threads]
        draws = [drawn for drawn in possible if drawn is not None]
        if not draws and otherwise is not None and not self._shared and not self._untracked:
            return otherwise
        if len(draws) != 1 or self._shared:
            raise GateError(
                f"a recomputation in backward finds {len(draws)} draws of the gates that could "
                "belong to it: use checkpoint(..., use_reentrant=False), inside of a call of the "
                "GatedModel, with gates that learn or are frozen, in one mode for forward and "
                "backward, and not in several threads"
            )
        return draws[0]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start without draws, and with a new number."""
        return Draws, ()


class _ThreadDraws:
    """The draws of one thread.

    Attributes:
        held: the draws of the calls that it is in.
        calls: references to them, tied to their graphs.
        timeline: the node number from which on each draw was in force.
    """

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.calls: list[DrawReference] = []
        self.timeline: list[tuple[int, DrawReference]] = []

    @property
    def now(self) -> DrawReference:
        """The draw in force."""
        return self.calls[-1] if self.calls else None

    def record(self, draw: DrawReference) -> None:
        """From the next node on this draw is in force."""
        following = torch._C._autograd._get_sequence_nr()
        if self.timeline and self.timeline[-1][0] == following:
            self.timeline.pop()
        self.timeline.append((following, draw))

    def at(self, number: int, ended: bool) -> Tensor | None:
        """The draw in force when the node of this number was made, or one that had ``ended``."""
        until = bisect_right(self.timeline, number, key=itemgetter(0))
        earliest = 0 if ended else max(until - 1, 0)
        past = reversed(self.timeline[earliest:until])
        draws = (reference() for _, reference in past if reference is not None)
        return next((drawn for drawn in draws if drawn is not None), None)


def _is_alive(draw: DrawReference) -> bool:
    return draw is not None and draw() is not None


def _refuse_lost_gradient(_: Tensor) -> None:
    """Only a reentrant checkpoint differentiates the recomputed graph."""
    raise GateError(REENTRANT)
