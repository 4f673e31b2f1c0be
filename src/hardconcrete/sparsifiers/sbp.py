"""SBP, structured Bayesian pruning (Neklyudov, Molchanov, Ashukha, Vetrov 2017).

Each unit is multiplied by noise z = exp(x). The posterior of x is a normal distribution truncated
to [a, b], and the prior is uniform there: z is truncated log-normal, with a log-uniform prior.
Below, alpha = (a - mu) / sigma, beta = (b - mu) / sigma, and Z = Phi(beta) - Phi(alpha). All is
computed in float64, by logarithms: Z underflows where mu lies outside [a, b].
"""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.special import log_ndtr

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.noise import NoiseGates
from hardconcrete.sparsifiers.unit_weights import UnitWeights

LOWER, UPPER = -20.0, 0.0
"""a and b of the paper's experiments: z lies in [2e-9, 1]."""

MU, LOG_SIGMA = (-20.0, 5.0), (-20.0, 5.0)
"""Parameters are clamped to these intervals, as in the authors' code."""

INITIAL_LOG_SIGMA = -5.0
"""In the authors' code, with mu = 0."""

MARGIN = 1e-12
"""Uniform noise is at least this far from 0 and 1, where quantiles are infinite."""

Law = tuple[Tensor, Tensor]
"""mu and sigma, in float64."""


class SBP(NoiseGates):
    """Multiplicative log-normal noise. A unit goes where its signal-to-noise ratio is low.

    Args:
        threshold: units with a ratio E[z] / deviation of z up to this are closed. The paper's is 1.

    Example:
        >>> family = SBP()
        >>> parameters = {"mu": torch.tensor([0.0, -9.0]), "log_sigma": torch.tensor([-5.0, 2.0])}
        >>> family.signal_to_noise(parameters) > 1
        tensor([ True, False])
    """

    readouts: ClassVar[tuple[str, ...]] = ("snr",)
    droprate: ClassVar[float | None] = 1 / (1 + math.exp(-2 * INITIAL_LOG_SIGMA))

    def __init__(self, threshold: float = 1.0) -> None:
        if not 0 < threshold < math.inf:
            raise ArgumentError(f"threshold={threshold} must be a ratio above 0")
        self.threshold = threshold

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """Mu = 0, and the variance p / (1 - p) that Gaussian dropout with the rate p has."""
        log_sigma = 0.5 * (droprate.log() - torch.log1p(-droprate))
        return {"mu": torch.zeros_like(log_sigma).float(), "log_sigma": log_sigma.float()}

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """exp(mu + sigma Phi^-1(Phi(alpha) + u Z)) with uniform u."""
        mu, sigma = _law(parameters)
        size = (*shape, *mu.shape)
        u = torch.rand(size, dtype=mu.dtype, device=mu.device, generator=generator)
        below, above = torch.special.ndtr((LOWER - mu) / sigma), torch.special.ndtr(-mu / sigma)
        quantile = torch.special.ndtri((below + u * (above - below)).clamp(MARGIN, 1 - MARGIN))
        z: Tensor = (mu + sigma * quantile).clamp(LOWER, UPPER).exp().float()
        return z

    def divergence_from_prior(self, parameters: GateParameters) -> Tensor:
        """KL(q(z) || p(z)), in closed form: the log width of the prior less the entropy of x."""
        mu, sigma = _law(parameters)
        alpha, beta, log_z = (LOWER - mu) / sigma, (UPPER - mu) / sigma, _log_mass(mu, sigma)
        inner = alpha * (_log_density(alpha) - log_z).exp()
        inner = inner - beta * (_log_density(beta) - log_z).exp()
        entropy = 0.5 * math.log(2 * math.pi * math.e) + sigma.log() + log_z + 0.5 * inner
        return (math.log(UPPER - LOWER) - entropy).float()

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """The divergence; the paper minimises it over N next to the mean loss."""
        return self.divergence_from_prior(parameters)

    def mean(self, parameters: GateParameters) -> Tensor:
        """E[z]."""
        return _log_moment(*_law(parameters), 1).exp().float()

    def signal_to_noise(self, parameters: GateParameters) -> Tensor:
        """E[z] / sqrt(Var[z]), from the ratio of E[z^2] and E[z]^2."""
        law = _law(parameters)
        excess = torch.expm1(_log_moment(*law, 2) - 2 * _log_moment(*law, 1))
        return excess.clamp_min(torch.finfo(excess.dtype).tiny).rsqrt().float()

    def is_open(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
        """Whether the signal-to-noise ratio is above the threshold."""
        return self.signal_to_noise(parameters) > self.threshold

    def ranking(self, parameters: GateParameters) -> Tensor:
        """The signal-to-noise ratio."""
        return self.signal_to_noise(parameters)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Almost no noise around 1, or almost the prior."""
        return {
            "mu": torch.where(is_open, UPPER, LOWER),
            "log_sigma": torch.where(is_open, *LOG_SIGMA),
        }


def _law(parameters: GateParameters) -> Law:
    mu, log_sigma = parameters["mu"].double(), parameters["log_sigma"].double()
    return mu.clamp(*MU), log_sigma.clamp(*LOG_SIGMA).exp()


def _log_density(x: Tensor) -> Tensor:
    """Log phi(x) of the standard normal."""
    return -0.5 * (x.square() + math.log(2 * math.pi))


def _log_mass(mu: Tensor, sigma: Tensor) -> Tensor:
    """Log of the mass of a normal distribution between a and b, in the tail that does not cancel.

    Phi(beta) - Phi(alpha) = Phi(-alpha) - Phi(-beta).
    """
    low, high = (LOWER - mu) / sigma, (UPPER - mu) / sigma
    flip = low + high > 0
    low, high = torch.where(flip, -high, low), torch.where(flip, -low, high)
    gap = log_ndtr(low) - log_ndtr(high)
    mass: Tensor = log_ndtr(high) + torch.log(-torch.expm1(gap.clamp_max(-1e-300)))
    return mass


def _log_moment(mu: Tensor, sigma: Tensor, k: int) -> Tensor:
    """Log E[z^k]: exp(k x) moves the normal distribution by k sigma^2."""
    moved = mu + k * sigma.square()
    return k * mu + 0.5 * (k * sigma).square() + _log_mass(moved, sigma) - _log_mass(mu, sigma)
