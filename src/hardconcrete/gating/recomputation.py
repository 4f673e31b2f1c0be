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
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter
from threading import Thread, current_thread
from types import FrameType

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from hardconcrete.errors import GateError

REENTRANT = (
    "reentrant activation checkpointing loses the gradients of the gates: use "
    "checkpoint(..., use_reentrant=False)"
)


def in_backward() -> bool:
    """Whether gradients are being computed now, so that a forward here is a recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def refuse_reentrant(drawn: Tensor) -> None:
    """Refuse a reentrant checkpoint, which where no input needs a gradient is not even recomputed.

    Its forward runs without gradients, though the draw has one.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not drawn.requires_grad:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise GateError(REENTRANT)
        frame = frame.f_back


Kept = weakref.ref[Tensor] | None
"""A draw as long as its graph is there; none outside of calls, and of gates without gradients."""

Timeline = list[tuple[int, Kept]]
"""From which node on which draw was in force, in order."""

MANY = 64
"""Beyond so many entries those whose graphs are gone are dropped; double what is left is next."""


class Draws:
    """Which draw was in force when; each is gone with the graph that it is part of.

    Threads number their nodes for themselves, so each has a timeline. A node does not tell its
    thread: where two threads could be meant, none is taken.
    """

    def __init__(self) -> None:
        self._timelines: dict[Thread, Timeline] = {}
        self._many = MANY
        self._again: list[Tensor] = []

    @contextmanager
    def during(self, drawn: Tensor) -> Iterator[None]:
        """While this lasts the draw is in force, and afterwards that of before."""
        timeline = self._timelines.setdefault(current_thread(), [])
        before = timeline[-1][1] if timeline else None
        _note(timeline, self._kept(drawn))
        try:
            yield
        finally:
            _note(timeline, before)
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
        if sum(map(len, self._timelines.values())) <= self._many:
            return
        for thread, timeline in list(self._timelines.items()):
            told = pairwise([(0, None), *timeline])
            timeline[:] = [new for old, new in told if _there(old[1]) or _there(new[1])]
            if not timeline:
                del self._timelines[thread]
        self._many = max(MANY, 2 * sum(map(len, self._timelines.values())))

    def recomputed(self) -> Tensor:
        """The draw of the forward that is being recomputed."""
        return self._again[-1] if self._again else self._own(ended=False)

    @contextmanager
    def again(self, drawn: Tensor) -> Iterator[None]:
        """While a recomputation lasts that drew for itself, which has to be the same."""
        if not drawn.requires_grad:
            yield
            return
        own = self._own(ended=True)
        if not torch.equal(own, drawn):
            raise GateError(
                "a recomputation in backward drew other gates than its forward: checkpoint with "
                "preserve_rng_state=True and without a generator, or checkpoint inside the model"
            )
        self._again.append(own)
        try:
            yield
        finally:
            self._again.pop()

    def _own(self, ended: bool) -> Tensor:
        """What was in force for the node being differentiated, or ``ended`` before it was made."""
        number = torch._C._current_autograd_node()._sequence_nr()
        found = [_at(number, timeline, ended) for timeline in list(self._timelines.values())]
        draws = [drawn for drawn in found if drawn is not None]
        if len(draws) != 1:
            raise GateError(
                f"a recomputation in backward finds {len(draws)} draws of the gates that could be "
                "its own: use checkpoint(..., use_reentrant=False), inside of a call of the "
                "GatedModel, in one mode for forward and backward, and not in several threads"
            )
        return draws[0]


def _note(timeline: Timeline, draw: Kept) -> None:
    """From the next node on it is this one."""
    following = torch._C._autograd._get_sequence_nr()
    if timeline and timeline[-1][0] == following:
        timeline.pop()
    timeline.append((following, draw))


def _at(number: int, timeline: Timeline, ended: bool) -> Tensor | None:
    """What was in force when the node of this number was made, or else had ``ended`` just then."""
    until = bisect_right(timeline, number, key=itemgetter(0))
    earliest = 0 if ended else until - 1
    draws = (kept() for _, kept in reversed(timeline[max(earliest, 0) : until]) if kept is not None)
    return next((drawn for drawn in draws if drawn is not None), None)


def _there(draw: Kept) -> bool:
    return draw is not None and draw() is not None


def _refuse_lost_gradient(_: Tensor) -> None:
    """A recomputed graph is thrown away, unless the checkpoint is a reentrant one."""
    raise GateError(REENTRANT)
