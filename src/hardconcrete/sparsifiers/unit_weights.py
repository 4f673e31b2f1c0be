"""The weights that gates multiply, as families see them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitWeights:
    """The weights that the gates multiply, without their gates.

    Args:
        rows: for each group a matrix with one row per unit.
        log_variances: of the noise of these weights, likewise; empty without ``has_noise``.

    Example:
        >>> weights = UnitWeights((torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.ones(1, 3)))
        >>> weights.squares(), weights.sizes()
        (tensor([25.,  1.,  3.]), tensor([2., 2., 3.]))
    """

    rows: tuple[Tensor, ...]
    log_variances: tuple[Tensor, ...] = ()

    def squares(self) -> Tensor:
        """The sum of squares of the weights of each gate."""
        return torch.cat([rows.float().square().sum(1) for rows in self.rows])

    def sizes(self) -> Tensor:
        """|g|: how many weights each gate multiplies."""
        return torch.cat([rows.new_full((len(rows),), rows.shape[1]).float() for rows in self.rows])
