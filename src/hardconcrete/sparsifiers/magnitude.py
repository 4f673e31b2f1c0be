"""Magnitude: the units with the smallest weights go (Li et al. 2017)."""

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.marked import MarkedUnits
from hardconcrete.sparsifiers.unit_weights import UnitWeights


class Magnitude(MarkedUnits):
    """Nothing is added to the loss. A fixed part of each group stays, by the sum of |w|.

    Li et al. rank the filters of a layer by this sum (section 3.1). Here it is that of the weights
    which read a unit.

    Args:
        keep: the fraction of the units of each group that stay, at least one.

    Example:
        >>> weights = UnitWeights((torch.tensor([[1.0, 1.0], [0.0, 1.0], [-3.0, 0.0]]),))
        >>> Magnitude(keep=0.7).keeps({}, weights)
        tensor([1., 0., 1.])
    """

    def __init__(self, keep: float = 0.5) -> None:
        if not 0 < keep <= 1:
            raise ArgumentError(f"keep={keep} must be a fraction above 0, at most 1")
        self.keep = keep

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """Nothing."""
        return torch.zeros_like(weights.sizes())

    def keeps(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """The largest of each group."""
        return torch.cat([self._largest(rows) for rows in weights.rows])

    def _largest(self, rows: Tensor) -> Tensor:
        sums = rows.float().abs().sum(1)
        count = max(1, round(self.keep * len(rows)))
        return torch.zeros_like(sums).index_fill(0, sums.topk(count).indices, 1.0)
