"""BC-GHS, Bayesian compression with a group horseshoe prior (Louizos, Ullrich, Welling 2017).

The weights have the posterior and prior of ``bayesian_compression``; here the prior of z differs.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.bayesian_compression import (
    INITIAL_DEVIATION,
    INITIAL_LOG_VARIANCE,
    MAX_EXPONENT,
    clamped_exp,
    weight_divergence,
)
from hardconcrete.sparsifiers.noise import NoiseGates
from hardconcrete.sparsifiers.unit_weights import UnitWeights


class GroupHorseshoe(nn.Module, NoiseGates):
    """BC-GHS: z = s z' where s and z' have half-Cauchy priors, C+(0, tau) and C+(0, 1).

    A squared half-Cauchy variable is the product of a Gamma(1/2, scale tau^2) and an inverse
    Gamma(1/2, 1) variable; the posterior of each factor is log-normal, so z is log-normal, too.
    s is shared by all gates of the network. (The paper has one s for each layer.)

    Args:
        tau: scale of the prior of s. The paper's is 1e-5.
        threshold: units are closed where minus the log mode of z is from here on.

    Example:
        >>> family = GroupHorseshoe()
        >>> gates = family.start(torch.tensor([GroupHorseshoe.droprate]))
        >>> family.is_open(gates, "threshold"), family.mean(gates).round(decimals=2).tolist()
        (tensor([True]), [1.0])
    """

    readouts: ClassVar[tuple[str, ...]] = ("threshold",)
    droprate: ClassVar[float | None] = 1 / (1 + math.exp(-INITIAL_LOG_VARIANCE))
    has_noise: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True

    def __init__(self, tau: float = 1e-5, threshold: float = 1.5) -> None:
        super().__init__()
        if not (tau > 0 and math.isfinite(threshold)):
            raise ArgumentError(f"tau={tau} must be above 0, and threshold={threshold} finite")
        self.tau, self.threshold = tau, threshold
        log_s = 2 * math.log(tau)  # s = 1, where the prior of s_a is, and the tail of that of s_b
        self.log_scale = nn.Parameter(torch.tensor([log_s, -log_s]))
        self.log_scale_variance = nn.Parameter(torch.full((2,), INITIAL_LOG_VARIANCE))

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """The median of z is 1, and its log has the variance p / (1 - p)."""
        variance = (2 * droprate / (1 - droprate)).log().float()  # of each factor, times 1/4
        zero = torch.zeros_like(variance)
        return {
            "log_a": zero,
            "log_b": zero.clone(),
            "log_a_variance": variance,
            "log_b_variance": variance.clone(),
        }

    def spread(self, parameters: GateParameters) -> None:
        """Normal around the variances."""
        for name in ("log_a_variance", "log_b_variance"):
            values = parameters[name]
            values.add_(INITIAL_DEVIATION * torch.randn_like(values))

    def log_normal(self, parameters: GateParameters) -> tuple[Tensor, Tensor]:
        """Mean and variance of log z = (log s_a + log s_b + log a + log b) / 2."""
        mean = parameters["log_a"] + parameters["log_b"] + self.log_scale.sum()
        variance = clamped_exp(parameters["log_a_variance"]) + clamped_exp(
            parameters["log_b_variance"]
        )
        return 0.5 * mean, 0.25 * (variance + clamped_exp(self.log_scale_variance).sum())

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Exp of normal noise; that of s is shared by all gates of a draw."""
        mean, whole = self.log_normal(parameters)
        of_s = 0.25 * clamped_exp(self.log_scale_variance).sum()
        options: Any = {"dtype": mean.dtype, "device": mean.device, "generator": generator}
        noise = torch.randn((*shape, *mean.shape), **options)
        common = torch.randn((*shape, 1), **options)
        return clamped_exp(mean + (whole - of_s).clamp_min(0).sqrt() * noise + of_s.sqrt() * common)

    def mean(self, parameters: GateParameters) -> Tensor:
        """exp(mean + variance / 2)."""
        mean, variance = self.log_normal(parameters)
        return clamped_exp(mean + 0.5 * variance)

    def variance(self, parameters: GateParameters) -> Tensor:
        """That of a log-normal variable."""
        variance = self.log_normal(parameters)[1]
        return torch.expm1(variance.clamp_max(MAX_EXPONENT)) * self.mean(parameters).square()

    def is_open(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
        """Whether minus the log mode, variance - mean, is below the threshold."""
        mean, variance = self.log_normal(parameters)
        return variance - mean < self.threshold

    def ranking(self, parameters: GateParameters) -> Tensor:
        """The mode of z."""
        mean, variance = self.log_normal(parameters)
        return clamped_exp(mean - variance)

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:
        """The divergences of z' and of the weights, and an equal part of that of s."""
        own = gamma_divergence(parameters["log_a"], parameters["log_a_variance"], 1.0)
        own = own + inverse_gamma_divergence(parameters["log_b"], parameters["log_b_variance"])
        (a, b), (a_variance, b_variance) = self.log_scale, self.log_scale_variance
        shared = gamma_divergence(a, a_variance, self.tau**2)
        shared = shared + inverse_gamma_divergence(b, b_variance)
        return own + weight_divergence(weights) + shared / len(own)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Z is 1 almost without noise, or its mode is far below the threshold."""
        of_s = self.log_scale.sum() + 0.25 * clamped_exp(self.log_scale_variance).sum()
        log_a = torch.where(is_open, -of_s.detach(), -MAX_EXPONENT)
        variance = torch.full_like(log_a, -40.0)
        return {
            "log_a": log_a,
            "log_b": torch.zeros_like(log_a),
            "log_a_variance": variance,
            "log_b_variance": variance.clone(),
        }


def gamma_divergence(mean: Tensor, log_variance: Tensor, scale: float) -> Tensor:
    """KL(LogNormal || Gamma(1/2, scale)), in closed form.

    log p(x) = -log(x) / 2 - x / scale - log(scale) / 2 - log(pi) / 2.
    """
    expected = clamped_exp(mean + 0.5 * clamped_exp(log_variance)) / scale
    constant = 0.5 * math.log(scale) + 0.5 * math.log(math.pi)
    return 0.5 * mean + expected + constant - _entropy(mean, log_variance)


def inverse_gamma_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(LogNormal || inverse Gamma(1/2, 1)): the inverse variables have the one above."""
    return gamma_divergence(-mean, log_variance, 1.0)


def _entropy(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Of a log-normal variable."""
    return mean + 0.5 * (math.log(2 * math.pi * math.e) + log_variance)
