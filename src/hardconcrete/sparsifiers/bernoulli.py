"""Bernoulli gates with a straight-through gradient, without and with a Beta prior."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters, Sparsifier
from hardconcrete.sparsifiers.hard_concrete import CERTAIN, INITIAL_DEVIATION, REMOVED
from hardconcrete.sparsifiers.unit_weights import UnitWeights


class StraightThrough(Sparsifier):
    """Gates of 0 and 1. The gradient of a draw is that of its mean (Bengio et al. 2013).

    This gradient is biased, because it ignores that a draw is rounded.

    Example:
        >>> family = StraightThrough()
        >>> parameters = {"logits": torch.tensor([-2.0, 0.5])}
        >>> family.open_probability(parameters), family.readout(parameters, "binary")
        (tensor([0.1192, 0.6225]), tensor([0., 1.]))
    """

    readouts: ClassVar[tuple[str, ...]] = ("binary", "mean")
    location: ClassVar[str | None] = "logits"

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """The logits of the probability to stay, 1 - p."""
        return {"logits": (torch.log1p(-droprate) - droprate.log()).float()}

    def spread(self, parameters: GateParameters) -> None:
        """Normal around the logits."""
        parameters["logits"].add_(INITIAL_DEVIATION * torch.randn_like(parameters["logits"]))

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """0 or 1, with the gradient of the probability."""
        p = self.open_probability(parameters).expand(*shape, -1)
        u = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=generator)
        return (u < p).to(p.dtype) + (p - p.detach())

    def open_probability(self, parameters: GateParameters) -> Tensor:
        """sigmoid(logits)."""
        return parameters["logits"].sigmoid()

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        """1 where the probability is above 1/2, else 0; or the probability."""
        p = self.open_probability(parameters)
        return p if rule == "mean" else (p > 0.5).to(p.dtype)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Logits far outside of where gates are random."""
        return {"logits": torch.where(is_open, CERTAIN, -CERTAIN)}

    def removed(self, is_open: Tensor) -> dict[str, Tensor]:
        """Logits below those of all gates that are still there."""
        return {"logits": torch.full(is_open.shape, REMOVED, device=is_open.device)}


class GeneralizedDropout(StraightThrough):
    """Bernoulli gates whose probabilities have a Beta(a, b) prior (Srinivas and Babu 2016).

    The probabilities are learned as a point: the penalty is -log Beta(p; a, b). With a and b below
    1 its ends are poles, so probabilities move to 0 and 1. The readout is the mean, and a unit goes
    where its probability is below the threshold.

    Args:
        a: of the Beta prior.
        b: of the Beta prior. Both defaults, and the threshold, are those of the re-implementation
            by Lee et al. 2018.
        threshold: units with a smaller probability are closed.

    Example:
        >>> family = GeneralizedDropout()
        >>> family.readout({"logits": torch.tensor([-9.0, 2.0])}, "threshold")
        tensor([0.0000, 0.8808])
    """

    readouts: ClassVar[tuple[str, ...]] = ("threshold", "binary")

    def __init__(self, a: float = 1e-3, b: float = 0.5, threshold: float = 1e-3) -> None:
        if not (a > 0 and b > 0 and 0 <= threshold < 1):
            raise ArgumentError(
                f"a={a} and b={b} must be above 0, and threshold={threshold} in [0, 1)"
            )
        self.a, self.b, self.threshold = a, b, threshold

    def complexity(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:  # noqa: ARG002
        """-log Beta(p; a, b), the prior's term of the posterior mode."""
        logits = parameters["logits"]
        norm = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
        return norm - (self.a - 1) * logsigmoid(logits) - (self.b - 1) * logsigmoid(-logits)

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        """The probability, or 0 below the threshold; or 1 where it is above 1/2, else 0."""
        if rule == "binary":
            return super().readout(parameters, rule)
        p = self.open_probability(parameters)
        return p * (p > self.threshold)
