"""What is added to the loss of the task."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hardconcrete.errors import ArgumentError


@runtime_checkable
class Penalty(Protocol):
    """A term of the loss, with a state: ``L0Penalty`` and ``Budget`` are two.

    Add ``penalty()`` to the loss, call ``penalty.step()`` after each step of the optimizer, and
    save ``penalty.state_dict()`` with the model.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> isinstance(hc.L0Penalty(gated, 0.1), Penalty)
        True
    """

    def __call__(self) -> Tensor:
        """The term, a scalar."""

    def step(self) -> None:
        """Call it after each step of the optimizer."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Load the state of the model first."""


class Penalties:
    """The sum of several penalties, which is a penalty too.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> one, two = hc.L0Penalty(gated, 0.1), hc.L0Penalty(gated, 0.2)
        >>> bool(Penalties([one, two])() == one() + two())
        True
    """

    def __init__(self, penalties: Iterable[Penalty]) -> None:
        if not isinstance(penalties, Iterable):
            raise ArgumentError(f"Penalties takes a list of them, not a {type(penalties).__name__}")
        self.penalties = tuple(penalties)
        for penalty in self.penalties:
            if not isinstance(penalty, Penalty):
                raise ArgumentError(
                    f"a {type(penalty).__name__} is no penalty: it needs __call__, step, "
                    "state_dict and load_state_dict"
                )
        if not self.penalties:
            raise ArgumentError("Penalties needs one penalty at least")

    def __call__(self) -> Tensor:
        """The sum."""
        first, *others = self.penalties
        total = first()
        for penalty in others:
            total = total + penalty()
        return total

    def step(self) -> None:
        """Of each penalty."""
        for penalty in self.penalties:
            penalty.step()

    def state_dict(self) -> dict[str, Any]:
        """The states by position."""
        return {str(k): penalty.state_dict() for k, penalty in enumerate(self.penalties)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, with as many penalties."""
        if len(state) != len(self.penalties):
            raise ArgumentError(
                f"this is the state of {len(state)} penalties, and there are {len(self.penalties)}"
            )
        missing = [str(k) for k in range(len(state)) if str(k) not in state]
        if missing:
            raise ArgumentError(
                f"this is no state of Penalties: it has no entry {missing[0]!r}, and has "
                f"{', '.join(map(repr, state))}"
            )
        for k, penalty in enumerate(self.penalties):
            penalty.load_state_dict(state[str(k)])
