"""Which draw a recomputation in backward belongs to.

Activation checkpointing runs parts of a forward again while its gradients are computed, when the
call that drew the gates is over and perhaps others have drawn since. The node being differentiated
lies in the graph of its own forward: from there only the draw of that forward can be reached.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
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


class Draws:
    """Draws, each kept by the node of the graph that made it, and gone with that graph."""

    def __init__(self) -> None:
        self._owners: dict[Node, Tensor] = {}

    def remember(self, drawn: Tensor) -> None:
        """Keep a draw; under torch.func nothing is recomputed, and no leaf can be made."""
        self._owners.clear()
        if drawn.grad_fn is not None and torch._C._functorch.maybe_current_level() is None:
            leaf = drawn.detach().requires_grad_()
            leaf.register_hook(_refuse_lost_gradient)
            _notes(drawn.grad_fn)[self] = leaf

    def recomputed(self) -> Tensor:
        """The draw of the forward that is being recomputed."""
        node = torch._C._current_autograd_node()
        if node not in self._owners:
            visited = _reachable(node)
            draws = [_notes(source)[self] for source in visited if self in _notes(source)]
            if len(draws) != 1:
                raise GateError(
                    f"a recomputation in backward finds {len(draws)} draws of the gates that could "
                    "be its own: use checkpoint(..., use_reentrant=False), and let no forward feed "
                    "another one before backward"
                )
            self._owners.update(dict.fromkeys(visited, draws[0]))
        return self._owners[node]

    def refuse_another(self, drawn: Tensor) -> None:
        """Refuse a recomputation that drew for itself, unless it drew the same."""
        if drawn.requires_grad and not torch.equal(self.recomputed(), drawn):
            raise GateError(
                "a recomputation in backward drew other gates than its forward: checkpoint with "
                "preserve_rng_state=True and without a generator, or checkpoint inside the model"
            )


def _notes(node: Node) -> dict[Any, Tensor]:
    notes: Any = node.metadata  # a dictionary, declared as a method
    return notes  # type: ignore[no-any-return]


def _reachable(node: Node) -> set[Node]:
    visited, waiting = {node}, [node]
    while waiting:
        for successor, _ in waiting.pop().next_functions:
            if successor is not None and successor not in visited:
                visited.add(successor)
                waiting.append(successor)
    return visited


def _refuse_lost_gradient(_: Tensor) -> None:
    """A recomputed graph is thrown away, unless the checkpoint is a reentrant one."""
    raise GateError(REENTRANT)
