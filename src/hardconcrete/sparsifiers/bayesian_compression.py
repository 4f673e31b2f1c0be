"""BC-GNJ and BC-GHS, Bayesian compression (Louizos, Ullrich, Welling 2017).

A unit has a random scale z, and its weights are w = z v, where each v has the posterior N(m, s^2)
and the prior N(0, 1) (eq. 6). m is the weight of your module; the bank keeps log s^2. The two
methods differ in the prior of z. Weights and biases without a gate are points.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters, UnitWeights
from hardconcrete.sparsifiers.log_uniform import log_alpha, log_uniform_divergence
from hardconcrete.sparsifiers.noise import NoiseGates

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
            0.5 * (_exp(variances) + rows.float().square() - variances - 1).sum(1)
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
        return mu + _exp(0.5 * parameters["log_variance"]) * noise

    def mean(self, parameters: GateParameters) -> Tensor:
        """The parameter mu."""
        return parameters["mu"]

    def variance(self, parameters: GateParameters) -> Tensor:
        """sigma^2, the parameter."""
        return _exp(parameters["log_variance"])

    def is_open(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
        """Whether log alpha is below the threshold."""
        return _log_alpha(parameters) < self.threshold

    def ranking(self, parameters: GateParameters) -> Tensor:
        """1 / alpha."""
        return _exp(-_log_alpha(parameters))

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:
        """Both divergences (eqs. 7 and 8)."""
        return log_uniform_divergence(_log_alpha(parameters)) + weight_divergence(weights)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Almost no noise around 1, or much more noise than mean."""
        mu = torch.where(is_open, 1.0, 0.0)
        return {"mu": mu, "log_variance": torch.where(is_open, -40.0, 20.0)}


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
        variance = _exp(parameters["log_a_variance"]) + _exp(parameters["log_b_variance"])
        return 0.5 * mean, 0.25 * (variance + _exp(self.log_scale_variance).sum())

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Exp of normal noise; that of s is shared by all gates of a draw."""
        mean, whole = self.log_normal(parameters)
        of_s = 0.25 * _exp(self.log_scale_variance).sum()
        options: Any = {"dtype": mean.dtype, "device": mean.device, "generator": generator}
        noise = torch.randn((*shape, *mean.shape), **options)
        common = torch.randn((*shape, 1), **options)
        return _exp(mean + (whole - of_s).clamp_min(0).sqrt() * noise + of_s.sqrt() * common)

    def mean(self, parameters: GateParameters) -> Tensor:
        """exp(mean + variance / 2)."""
        mean, variance = self.log_normal(parameters)
        return _exp(mean + 0.5 * variance)

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
        return _exp(mean - variance)

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
        of_s = self.log_scale.sum() + 0.25 * _exp(self.log_scale_variance).sum()
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
    expected = _exp(mean + 0.5 * _exp(log_variance)) / scale
    constant = 0.5 * math.log(scale) + 0.5 * math.log(math.pi)
    return 0.5 * mean + expected + constant - _entropy(mean, log_variance)


def inverse_gamma_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(LogNormal || inverse Gamma(1/2, 1)): the inverse variables have the one above."""
    return gamma_divergence(-mean, log_variance, 1.0)


def _entropy(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Of a log-normal variable."""
    return mean + 0.5 * (math.log(2 * math.pi * math.e) + log_variance)


def _log_alpha(parameters: GateParameters) -> Tensor:
    return log_alpha(parameters["mu"], parameters["log_variance"])


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
