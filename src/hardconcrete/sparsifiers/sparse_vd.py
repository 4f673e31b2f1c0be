"""Sparse VD, variational dropout that sparsifies (Molchanov, Ashukha, Vetrov 2017)."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.log_uniform import log_alpha, log_uniform_divergence
from hardconcrete.sparsifiers.marked import MarkedUnits
from hardconcrete.sparsifiers.unit_weights import UnitWeights


class SparseVD(MarkedUnits):
    """Each weight w has the posterior N(w, sigma^2) and a log-uniform prior.

    sigma^2 is learned as it is, "additive noise" in the paper (eq. 11), and not relative to w^2:
    the gradient of w has less variance so. A weight whose alpha = sigma^2 / w^2 is large is noise,
    and is removed. Warm up the penalty, as the paper advises.

    Args:
        threshold: weights with log alpha from here on are removed. The paper's is 3.

    Example:
        >>> weights = UnitWeights((torch.tensor([[1.0], [0.01]]),), (torch.full((2, 1), -5.0),))
        >>> SparseVD().keeps({}, weights)
        tensor([1., 0.])
    """

    has_noise: ClassVar[bool] = True
    log_variance: ClassVar[float] = -10.0
    per_weight: ClassVar[bool] = True

    def __init__(self, threshold: float = 3.0) -> None:
        if not math.isfinite(threshold):
            raise ArgumentError(f"threshold={threshold} must be a log alpha, such as 3")
        self.threshold = threshold

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """The sum of the divergences of the weights of each gate (eq. 14)."""
        return torch.cat(
            [
                log_uniform_divergence(log_alpha(rows.float(), variances)).sum(1)
                for rows, variances in zip(weights.rows, weights.log_variances, strict=True)
            ]
        )

    def keeps(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """Weights below the threshold; where a gate has several, one of them at least."""
        return torch.cat(
            [
                (log_alpha(rows.float(), variances) < self.threshold).any(1)
                for rows, variances in zip(weights.rows, weights.log_variances, strict=True)
            ]
        ).float()
