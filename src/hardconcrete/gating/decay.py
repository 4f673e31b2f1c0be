"""Who decays the gated weights: a penalty or an optimizer, and not both."""

from typing import Any
from weakref import WeakSet


class DecayOwners:
    """Penalties and optimizers belong to one model, and to none of its copies.

    Attributes:
        penalties: those that carry the decay of the gated weights.
        by_optimizer: names of the parameters that decay in an optimizer.
    """

    def __init__(self) -> None:
        self.penalties: WeakSet[Any] = WeakSet()
        self.by_optimizer: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have no owners."""
        return DecayOwners, ()
