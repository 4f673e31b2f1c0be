"""The gates of 0 and 1 with which a budget by importance trains."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hardconcrete.errors import GateError


class BudgetMask:
    """The mask in force, and what the host knows of it without asking the device.

    Attributes:
        values: 1 for open gates, else 0. Their memory stays the same, for CUDA graphs that read it.
        open_groups: numbers of the groups of which all gates are open.
    """

    def __init__(self, is_open: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.values = torch.empty_like(is_open, dtype=dtype)
        self.set(is_open, sizes)
        self._drawn_version = self.values._version

    @torch.no_grad()
    def set(self, is_open: Tensor, sizes: Sequence[int]) -> None:
        """Change the mask; ``sizes`` are the numbers of gates of all groups."""
        self.values.copy_(is_open)
        whole = torch.stack([part.all() for part in is_open.split_with_sizes([*sizes])]).tolist()
        self.open_groups = frozenset(k for k, is_whole in enumerate(whole) if is_whole)

    def note_drawn(self) -> None:
        """Remember which mask a call draws."""
        self._drawn_version = self.values._version

    def recomputed(self) -> Tensor:
        """The mask of the last call; refused if it changed since."""
        if self.values._version != self._drawn_version:
            raise GateError(
                "a budget closed units between a forward and its recomputation in backward: call "
                "budget.step() after loss.backward() and optimizer.step()"
            )
        return self.values

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.values = self.values.to(device)
        self._drawn_version = self.values._version
