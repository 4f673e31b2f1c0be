"""What compiled code sees of a draw that was made outside of it.

Code that is compiled once runs in forwards and in recomputations alike, and cannot ask which: an
operation that it does not look into asks when it runs.
"""

from typing import Any

import torch
from torch import Tensor

from hardconcrete.errors import GateError
from hardconcrete.gating.recomputation import Draws, in_checkpoint

NO_VALUE = (
    "gates have no value here: in training they are drawn for one call of the GatedModel; call it "
    "instead of its inner model, put other methods inside `with gated.draw():`, or call "
    "gated.eval() for the test-time values"
)


@torch.library.custom_op(  # a replayed graph would not ask
    "hardconcrete::as_drawn", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def as_drawn(z: Tensor, draws: int, held: bool, frozen: bool) -> Tensor:
    """The draw in force, which is z if it is held; a recomputation gets that of its forward."""
    if not in_checkpoint():
        if not held:
            raise GateError(NO_VALUE)
        return z.clone()
    own = Draws.numbered[draws].recomputed(z if frozen else None).detach()
    if own.shape != z.shape:
        raise GateError(
            "layers that were compiled on their own cannot be recomputed with a gate per example: "
            "compile the checkpoint with them, or use sample='batch'"
        )
    return own.clone()


@as_drawn.register_fake
def _(z: Tensor, draws: int, held: bool, frozen: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(z)


def _backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return gradient, None, None, None


as_drawn.register_autograd(_backward)
