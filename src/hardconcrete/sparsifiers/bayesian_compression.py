"""BC-GNJ, Bayesian compression (Louizos, Ullrich, Welling 2017).

A unit has a random scale z, and its weights are w = z v, where each v has the posterior N(m, s^2)
and the prior N(0, 1) (eq. 6). m is the weight of your module; the bank keeps log s^2. BC-GHS
differs in the prior of z. Weights and biases without a gate are points.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.log_uniform import log_alpha, log_uniform_divergence
from hardconcrete.sparsifiers.noise import NoiseGates
from hardconcrete.sparsifiers.unit_weights import UnitWeights

INITIAL_LOG_VARIANCE, INITIAL_DEVIATION = -9.0, 0.01
"""Of z and of the weights in the authors' code: log-variances are N(-9, 0.01^2)."""

MAX_EXPONENT = 60.0
"""Exponents are clamped here, so that float32 stays finite."""


def weight_divergence(weights: UnitWeights) -> Tensor:
    """KL(N(m, s^2) || N(0, 1)) of the weights of each gate (eq. 8).

    Example:
        >>> weights = UnitWeights((torch.zeros(1, 4),), (torch.zeros(1, 4),))
        >>> weight_divergence(weights)          # the posterior is the prior
        tensor([0.])
    """
    return torch.cat(
        [
            0.5 * (clamped_exp(variances) + rows.float().square() - variances - 1).sum(1)
            for rows, variances in zip(weights.rows, weights.log_variances, strict=True)
        ]
    )


class GroupNormalJeffreys(NoiseGates):
    """BC-GNJ: z has the posterior N(mu, alpha mu^2), and the prior 1 / |z|, which is log-uniform.

    Args:
        threshold: units with log alpha from here on are closed. The paper chooses it for each
            layer by eye; -3 lies between the values for LeNet in the authors' code.

    Example:
        >>> family = GroupNormalJeffreys()
        >>> gates = {"mu": torch.tensor([1.0, 0.1]), "log_variance": torch.tensor([-9.0, -4.0])}
        >>> family.readout(gates, "threshold")
        tensor([1., 0.])
    """

    readouts: ClassVar[tuple[str, ...]] = ("threshold",)
    droprate: ClassVar[float | None] = 1 / (1 + math.exp(-INITIAL_LOG_VARIANCE))
    has_noise: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True

    def __init__(self, threshold: float = -3.0) -> None:
        if not math.isfinite(threshold):
            raise ArgumentError(f"threshold={threshold} must be a log alpha, such as -3")
        self.threshold = threshold

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """Mu = 1, and the variance p / (1 - p) that Gaussian dropout with the rate p has."""
        log_variance = droprate.log() - torch.log1p(-droprate)
        return {"mu": torch.ones_like(log_variance).float(), "log_variance": log_variance.float()}

    def spread(self, parameters: GateParameters) -> None:
        """Normal around the variances; mu stays 1, so that evaluation is that of your model."""
        values = parameters["log_variance"]
        values.add_(INITIAL_DEVIATION * torch.randn_like(values))

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Mu + sigma * noise."""
        mu = parameters["mu"]
        noise = torch.randn(
            (*shape, *mu.shape), dtype=mu.dtype, device=mu.device, generator=generator
        )
        return mu + clamped_exp(0.5 * parameters["log_variance"]) * noise

    def mean(self, parameters: GateParameters) -> Tensor:
        """The parameter mu."""
        return parameters["mu"]

    def variance(self, parameters: GateParameters) -> Tensor:
        """sigma^2, the parameter."""
        return clamped_exp(parameters["log_variance"])

    def is_open(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
        """Whether log alpha is below the threshold."""
        return _log_alpha(parameters) < self.threshold

    def ranking(self, parameters: GateParameters) -> Tensor:
        """1 / alpha."""
        return clamped_exp(-_log_alpha(parameters))

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:
        """Both divergences (eq. 8, and eq. 14 of Molchanov et al. 2017)."""
        return log_uniform_divergence(_log_alpha(parameters)) + weight_divergence(weights)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Almost no noise around 1, or much more noise than mean."""
        mu = torch.where(is_open, 1.0, 0.0)
        return {"mu": mu, "log_variance": torch.where(is_open, -40.0, 20.0)}


def _log_alpha(parameters: GateParameters) -> Tensor:
    return log_alpha(parameters["mu"], parameters["log_variance"])


def clamped_exp(x: Tensor) -> Tensor:
    """exp(x), within what float32 can hold.

    Example:
        >>> clamped_exp(torch.tensor([0.0, 1e9])).isfinite().all()
        tensor(True)
    """
    return x.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
