"""Which draw a recomputation in backward belongs to.

Activation checkpointing runs parts of a forward again while its gradients are computed, when the
call that drew the gates is over and perhaps others have drawn since. Torch numbers the nodes of its
graph as they are made: the draw that was in force when the node being differentiated was made is
the one that its recomputation has to see.
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
    """Whether gradients are being computed now, so that a forward here is a recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def loses_gradients(drawn: Tensor) -> bool:
    """Whether no gradients are computed here, though the draw has one."""
    return drawn.requires_grad and not torch.is_grad_enabled()


def refuse_reentrant() -> None:
    """Refuse a reentrant checkpoint, which where no input needs a gradient is not even recomputed.

    Its forward loses gradients.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise GateError(REENTRANT)
        frame = frame.f_back


Kept = weakref.ref[Tensor] | None
"""A draw as long as its graph is there; none outside of calls, and of gates without gradients."""

MANY = 64
"""Beyond so many entries those whose graphs are gone are dropped; double what is left is next."""


def refuse_inside_draw() -> None:
    """Refuse to recompute a call while another draw is held: had it drawn for itself, or not?"""
    if in_backward():
        raise GateError(
            "a call of the GatedModel is recomputed inside of gated.draw(): call backward after it"
        )


class Draws:
    """Which draw was in force when; each is gone with the graph that it is part of.

    Threads number their nodes for themselves, so each has a timeline. A node does not tell its
    thread: where several could be meant, none is taken.
    """

    numbered: ClassVar[weakref.WeakValueDictionary[int, "Draws"]] = weakref.WeakValueDictionary()
    """All there are, for compiled code, which can hold a number."""
    _numbers: ClassVar[Iterator[int]] = count()

    def __init__(self) -> None:
        self.number = next(Draws._numbers)
        Draws.numbered[self.number] = self
        self._threads: dict[Thread, _Drawing] = {}
        self._many = MANY
        self._again: list[Tensor] = []
        self._unseen = False  # whether gates were drawn that neither learn nor are frozen
        self._elsewhere = False  # whether a thread has read gates that another one drew
        self.told: int | None = None  # the thread whose last word is the draw that it holds

    @_disable_dynamo
    def enter(self, drawn: Tensor, frozen: bool) -> "_Drawing | None":
        """From now on this draw is in force, until what is returned is handed to ``leave``."""
        if in_backward():
            self._again.append(self._same(drawn, frozen))
            return None
        self._unseen |= not frozen and torch.is_grad_enabled() and drawn.grad_fn is None
        mine = self._threads.setdefault(current_thread(), _Drawing())
        mine.held.append(drawn.detach())
        mine.calls.append(self._kept(drawn))
        mine.note(mine.now)
        self.told = get_ident()
        return mine

    @_disable_dynamo
    def leave(self, mine: "_Drawing | None") -> None:
        """From now on that of before."""
        if mine is None:
            self._again.pop()
            return
        mine.held.pop()
        mine.calls.pop()
        mine.note(mine.now)
        self.told = get_ident() if mine.calls else None
        self._forget()

    def _kept(self, drawn: Tensor) -> Kept:
        """By its node; under torch.func nothing is recomputed, and no leaf can be made."""
        if drawn.grad_fn is None or torch._C._functorch.maybe_current_level() is not None:
            return None
        leaf = drawn.detach().requires_grad_()
        leaf.register_hook(_refuse_lost_gradient)
        drawn.grad_fn.metadata[self] = leaf  # type: ignore[index]  # declared as a method
        return weakref.ref(leaf)

    def _forget(self) -> None:
        """Of draws that are gone one in a row is enough, of threads that have only such none."""
        if sum(len(each.timeline) for each in self._threads.values()) <= self._many:
            return
        for thread, each in list(self._threads.items()):
            told = pairwise([(0, None), *each.timeline])
            each.timeline[:] = [new for old, new in told if _there(old[1]) or _there(new[1])]
            if not each.timeline and not each.calls:
                del self._threads[thread]
        self._many = max(MANY, 2 * sum(len(each.timeline) for each in self._threads.values()))

    @_disable_dynamo
    def tell(self) -> None:
        """Gates are read in a forward where something else was told last: say again which."""
        mine = self._threads.get(current_thread())
        if mine is None or not mine.calls:
            self._elsewhere = True
            return
        mine.note(mine.now)
        self.told = get_ident()

    def refuse_other(self, z: Tensor, frozen: bool) -> None:
        """Gates are read by compiled code: in a recomputation, only those of its forward.

        A compiled backward that recomputes for itself has kept them; they need not be held.
        """
        if not in_backward():
            if self.told != get_ident():
                self.tell()
            return
        held = [each for mine in list(self._threads.values()) for each in mine.held]
        if self._again or not any(torch.equal(each, z) for each in held):
            return
        if not torch.equal(self._own(False, z if frozen else None), z):
            raise GateError(
                "layers that were compiled on their own are recomputed while other gates are drawn "
                "than in their forward: compile the checkpoint with them"
            )

    @_disable_dynamo
    def recomputed(self, frozen: Tensor | None) -> Tensor:
        """The draw of the forward that is being recomputed, or what gates had that were frozen."""
        drawn = self._again[-1] if self._again else self._own(ended=False, otherwise=frozen)
        mine = self._threads.get(current_thread())
        if mine is not None:  # what a recomputation makes is of no call, what follows is again
            mine.note(None)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: mine.note(mine.now))
        self.told = None
        return drawn

    def _same(self, drawn: Tensor, frozen: bool) -> Tensor:
        """What a recomputation drew for itself, which has to be what its forward drew."""
        if not frozen and not drawn.requires_grad:
            raise GateError(
                "a recomputation in backward draws gates without gradients, so that it cannot be "
                "compared with its forward: draw them outside of what is checkpointed, or use "
                "freeze_gates()"
            )
        own = self._own(ended=True, otherwise=drawn if frozen else None)
        if not torch.equal(own, drawn):
            raise GateError(
                "a recomputation in backward drew other gates than its forward: checkpoint one "
                "call of the GatedModel at a time, with preserve_rng_state=True, without a "
                "generator, outside of gated.draw() and with backward before freeze_gates(); or "
                "checkpoint inside the model"
            )
        return own

    def _own(self, ended: bool, otherwise: Tensor | None = None) -> Tensor:
        """What was in force for the node being differentiated, or ``ended`` before it was made."""
        node = torch._C._current_autograd_node()  # none where a backward is compiled
        threads = list(self._threads.values()) if node is not None else []
        found = [each.at(node._sequence_nr(), ended) for each in threads]
        draws = [drawn for drawn in found if drawn is not None]
        if not draws and otherwise is not None and not self._elsewhere and not self._unseen:
            return otherwise
        if len(draws) != 1 or self._elsewhere:
            raise GateError(
                f"a recomputation in backward finds {len(draws)} draws of the gates that could be "
                "its own: use checkpoint(..., use_reentrant=False), inside of a call of the "
                "GatedModel, with gates that learn or are frozen, in one mode for forward and "
                "backward, and not in several threads"
            )
        return draws[0]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles know of no draws, and have a number of their own."""
        return Draws, ()


class _Drawing:
    """What one thread has drawn: the calls it is in, and from which node on which draw held."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.calls: list[Kept] = []
        self.timeline: list[tuple[int, Kept]] = []

    @property
    def now(self) -> Kept:
        return self.calls[-1] if self.calls else None

    def note(self, draw: Kept) -> None:
        """From the next node on it is this one."""
        following = torch._C._autograd._get_sequence_nr()
        if self.timeline and self.timeline[-1][0] == following:
            self.timeline.pop()
        self.timeline.append((following, draw))

    def at(self, number: int, ended: bool) -> Tensor | None:
        """What was in force when the node of this number was made, or else had ``ended`` then."""
        until = bisect_right(self.timeline, number, key=itemgetter(0))
        earliest = 0 if ended else max(until - 1, 0)
        past = reversed(self.timeline[earliest:until])
        draws = (kept() for _, kept in past if kept is not None)
        return next((drawn for drawn in draws if drawn is not None), None)


def _there(draw: Kept) -> bool:
    return draw is not None and draw() is not None


def _refuse_lost_gradient(_: Tensor) -> None:
    """A recomputed graph is thrown away, unless the checkpoint is a reentrant one."""
    raise GateError(REENTRANT)
