"""States of models that lost units in training: who removes the same units before one is loaded.

Removing units belongs to ``hardconcrete.compaction``, which imports this folder and registers
itself here.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hardconcrete.errors import GateError

Remover = Callable[[Any, Tensor], None]
"""Takes a gated model and the dense indices of the gates that stay, and removes the others."""

_removers: list[Remover] = []


def removes_units(remover: Remover) -> Remover:
    """Register the function that removes units before a state is loaded; a decorator."""
    _removers[:] = [remover]
    return remover


def remove_units(gated: Any, original: Tensor) -> None:
    """Remove the units that a saved model had removed.

    Args:
        gated: the model that loads the state.
        original: ``gates.original`` of the state, the dense indices of the gates that stay.
    """
    if not _removers:
        raise GateError(
            "this state is of a model that hc.shrink made smaller: import hardconcrete.compaction, "
            "which removes the same units here, and load it again"
        )
    for remover in _removers:
        remover(gated, original)
