"""Importance that is measured while a model is trained."""

import torch
from torch import Tensor

MEAN_LIFETIME_STEPS = 100
"""After this many steps a measurement has 1/e of the weight of a new one."""


class RunningImportance:
    """The exponential running mean of (dL/dz)^2 for each gate.

    A step with infinite or NaN gradients is skipped, as ``GradScaler`` does.

    Args:
        like: a tensor with one entry for each gate, on the device to use.

    Example:
        >>> running = RunningImportance(torch.zeros(2))
        >>> running.add(torch.tensor([1.0, 2.0]))
        >>> running.mean()
        tensor([1., 4.])
    """

    def __init__(self, like: Tensor) -> None:
        self.total = torch.zeros_like(like, dtype=torch.float32).detach()
        self.weight = torch.zeros((), dtype=torch.float32, device=like.device)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient dL/dz of one step."""
        squares = gradient.float().square()
        is_finite = squares.isfinite().all()  # a tensor, because a bool would wait for the GPU
        decay = torch.where(is_finite, 1 - 1 / MEAN_LIFETIME_STEPS, 1.0)
        self.total.mul_(decay).add_(torch.where(is_finite, squares, 0.0))
        self.weight.mul_(decay).add_(is_finite)

    def mean(self) -> Tensor:
        """The mean; 0 before the first step."""
        return self.total / self.weight.clamp(min=1e-30)

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.total, self.weight = self.total.to(device), self.weight.to(device)

    def keep(self, index: Tensor) -> None:
        """Keep only these gates."""
        self.total = self.total[index]
