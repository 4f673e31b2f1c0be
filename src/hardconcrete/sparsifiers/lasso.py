"""Norms of the weights that make them exactly zero, by proximal steps: group lasso and L1."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.marked import MarkedUnits, nonzero_rows
from hardconcrete.sparsifiers.unit_weights import UnitWeights

LAM = 10.0
"""Lambda times N. Papers choose it for each network, so it is a start for your search."""


class GroupLasso(MarkedUnits):
    """lam * sum of sqrt(|g|) * norm of the weights of a unit (Yuan and Lin 2006).

    Wen et al. 2016 use it for the filters, channels and neurons of networks. A proximal step
    (Parikh and Boyd 2014, section 6.5) makes the weights of whole units zero, where a
    gradient would leave them small.

    Args:
        lam: lambda times the number of examples.

    Example:
        >>> GroupLasso().shrunk(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), amount=0.1)
        tensor([[2.1515, 2.8686],
                [0.0000, 0.0000]])
    """

    proximal: ClassVar[bool] = True

    def __init__(self, lam: float = LAM) -> None:
        _refuse_lam(lam)
        self.lam = lam

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """Lam * sqrt(|g|) * norm."""
        return self.lam * (weights.sizes() * weights.squares()).sqrt()

    def shrunk(self, rows: Tensor, amount: float) -> Tensor:
        """Rows times max(0, 1 - amount * lam * sqrt(|g|) / norm)."""
        bound = amount * self.lam * math.sqrt(rows.shape[1])
        norms = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
        factor = torch.where(norms > bound, 1 - bound / norms, 0.0)
        shrunk: Tensor = rows * factor.to(rows.dtype)
        return shrunk

    def keeps(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """Units with a weight."""
        return nonzero_rows(weights)


class L1(MarkedUnits):
    """lam * sum of |w| over the gated weights (Tibshirani 1996), by soft thresholds.

    Single weights become zero; a unit goes with its last weight.

    Args:
        lam: lambda times the number of examples.

    Example:
        >>> L1().shrunk(torch.tensor([[3.0, -4.0], [0.5, -0.5]]), amount=0.1)
        tensor([[ 2., -3.],
                [ 0., -0.]])
    """

    proximal: ClassVar[bool] = True

    def __init__(self, lam: float = LAM) -> None:
        _refuse_lam(lam)
        self.lam = lam

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """Lam * sum of |w|."""
        return self.lam * torch.cat([rows.float().abs().sum(1) for rows in weights.rows])

    def shrunk(self, rows: Tensor, amount: float) -> Tensor:
        """Each weight moves towards 0 by amount * lam, and stops there."""
        return rows.sign() * (rows.abs() - amount * self.lam).clamp_min(0)

    def keeps(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """Units with a weight."""
        return nonzero_rows(weights)


def _refuse_lam(lam: float) -> None:
    if not 0 <= lam < math.inf:
        raise ArgumentError(f"lam={lam} must not be negative or infinite")
