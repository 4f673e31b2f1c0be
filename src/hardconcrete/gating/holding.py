"""A call holds the values of the gates that it draws."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardconcrete.gating.checkpointing import in_backward

if TYPE_CHECKING:
    from hardconcrete.gating.bank import GateBank

Values = tuple[Tensor, ...]
"""Values of all gates, one tensor per group."""

Held = tuple[Values | None, Tensor | None, Values | None, frozenset[int]]
"""What modules in training see, by group; the same in one tensor, unless compiled code has drawn
it; what modules in evaluation see; the groups whose drawn gates are all 1 for certain."""


class Holding:
    """A context manager in which a bank holds values.

    It is a class, and writes past ``nn.Module.__setattr__``: compiled code would guard everything
    that a generator or the setter of modules reads, before each call.
    """

    def __init__(
        self,
        bank: "GateBank",
        drawn: Tensor | None,
        read: Tensor | None,
        at_one: frozenset[int],
    ) -> None:
        self._bank, self._drawn, self._read = bank, drawn, read
        self._at_one = at_one

    def __enter__(self) -> None:
        bank, drawn, read = self._bank, self._drawn, self._read
        compiling = torch.compiler.is_compiling()
        self._before = bank.held
        self._entered = None  # for ``leave``
        if drawn is not None and not compiling:
            self._entered = bank.draws.enter(drawn, bank.is_constant(drawn))
            if bank.budget_mask is not None and not in_backward():
                bank.budget_mask.note_drawn()
        held = (
            None if drawn is None else bank.by_group(drawn),
            None if compiling else drawn,
            None if read is None else bank.by_group(read),
            self._at_one,
        )
        object.__setattr__(bank, "held", None if drawn is None and read is None else held)

    def __exit__(self, *_: object) -> None:
        object.__setattr__(self._bank, "held", self._before)
        if self._drawn is not None and not torch.compiler.is_compiling():
            self._bank.draws.leave(self._entered)
