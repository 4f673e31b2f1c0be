"""Plain concrete gates, the relaxation that is never exactly 0."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from hardconcrete.distributions.rectified import MARGIN
from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters
from hardconcrete.sparsifiers.bernoulli import StraightThrough


class Concrete(StraightThrough):
    """s = sigmoid((logit(u) + logits) / temperature), without the stretch of hard concrete gates.

    Maddison et al. 2017 and Jang et al. 2017 relax Bernoulli gates this way, and Gal et al. 2017
    use it for dropout. A draw lies strictly between 0 and 1, so nothing is skipped in training.
    Penalties and budgets count the Bernoulli gate that is relaxed: P(s > 1/2) = sigmoid(logits).

    Args:
        temperature: the default is the paper's 2/3.

    Example:
        >>> gates = {"logits": torch.full((10_000,), -5.0)}
        >>> bool((Concrete().sample(gates) > 0).all()), StraightThrough().sample(gates).min().item()
        (True, 0.0)
    """

    readouts: ClassVar[tuple[str, ...]] = ("binary", "median")

    def __init__(self, temperature: float = 2 / 3) -> None:
        if not 0 < temperature < math.inf:
            raise ArgumentError(f"temperature={temperature} must be a number above 0")
        self.temperature = temperature

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A differentiable draw (eq. 10 without the stretch)."""
        logits = parameters["logits"]
        size = (*shape, *logits.shape)
        u = torch.rand(size, dtype=logits.dtype, device=logits.device, generator=generator)
        return ((torch.logit(u.clamp(MARGIN, 1 - MARGIN)) + logits) / self.temperature).sigmoid()

    def mean(self, parameters: GateParameters) -> Tensor:
        """E[s], by the middle of 256 equal parts of the noise: within 1e-3."""
        logits = parameters["logits"]
        u = (torch.arange(NODES, dtype=logits.dtype, device=logits.device) + 0.5) / NODES
        noise = torch.logit(u)[:, None]
        return ((noise + logits) / self.temperature).sigmoid().mean(0)

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        """1 where the Bernoulli gate is likelier open, else 0; or the median of the draws."""
        if rule == "binary":
            return super().readout(parameters, rule)
        return (parameters["logits"] / self.temperature).sigmoid()


NODES = 256
"""Points at which the mean is averaged."""
