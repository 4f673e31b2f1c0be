"""Importance measured while a model is trained."""

import torch
from torch import Tensor

MEMORY = 100
"""Measurements after which a squared gradient counts for 1/e of a new one."""


class RunningImportance:
    """The running mean of (dL/dz)^2 for each gate.

    A step whose gradients are infinite or not a number is left out, as ``GradScaler`` does.

    Args:
        like: any tensor with one entry for each gate; gives the device.

    Example:
        >>> running = RunningImportance(torch.zeros(2))
        >>> running.add(torch.tensor([1.0, 2.0]))
        >>> running.mean()
        tensor([1., 4.])
    """

    def __init__(self, like: Tensor) -> None:
        self.total = torch.zeros_like(like, dtype=torch.float32).detach()
        self.weight = torch.zeros((), dtype=torch.float32, device=like.device)

    def add(self, slope: Tensor) -> None:
        """Take in one measurement."""
        squares = slope.float().square()
        is_finite = squares.isfinite().all()  # stays on the device: asking would wait for it
        decay = torch.where(is_finite, 1 - 1 / MEMORY, 1.0)
        self.total.mul_(decay).add_(torch.where(is_finite, squares, 0.0))
        self.weight.mul_(decay).add_(is_finite)

    def mean(self) -> Tensor:
        """The mean so far; 0 before the first step."""
        return self.total / self.weight.clamp(min=1e-30)

    def to(self, device: torch.device) -> None:
        """Go on on another device."""
        self.total, self.weight = self.total.to(device), self.weight.to(device)

    def keep(self, places: Tensor) -> None:
        """Only these gates are left."""
        self.total = self.total[places]
