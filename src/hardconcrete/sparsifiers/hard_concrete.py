"""The paper's family: gates with a rectified distribution, hard concrete by default."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import kl_divergence

from hardconcrete.distributions import HardConcrete, Rectified
from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import GateParameters, Sparsifier

MakeRectified = Callable[[Tensor], Rectified]
"""Turns the locations, one per gate, into the distribution of the gates."""

INITIAL_DEVIATION = 0.01
"""Standard deviation of the initial log_alpha (section 4)."""

CERTAIN = 20.0
"""log_alpha of an open gate, and minus that of a closed one: the readouts are exactly 1 and 0."""

REMOVED = -100.0
"""log_alpha of a gate whose unit was removed: below that of every gate that is still there."""

FLAT = (Rectified.rsample, Rectified.icdf, HardConcrete.rsample, HardConcrete.icdf)
"""Samplers whose closed gates have no gradient; those of a subclass may have one."""


class RectifiedGates(Sparsifier):
    """Gates with one location each, and a ``Rectified`` distribution for given locations.

    Args:
        gate: turns ``log_alpha`` into a ``Rectified``. A module may learn what all gates share.

    Example:
        >>> family = RectifiedGates(HardConcrete)
        >>> parameters = family.start(torch.tensor([0.5, 0.05]))
        >>> parameters["log_alpha"], family.readout(parameters, "paper")
        (tensor([0.0000, 2.9444]), tensor([0.5000, 1.0000]))
    """

    readouts: ClassVar[tuple[str, ...]] = HardConcrete.readouts
    location: ClassVar[str | None] = "log_alpha"

    def __init__(self, gate: MakeRectified = HardConcrete) -> None:
        if not callable(gate):
            raise ArgumentError(f"gate must be callable on log_alpha, not a {type(gate).__name__}")
        _refuse_signature(gate)
        self.gate = gate

    def distribution(self, parameters: GateParameters) -> Rectified:
        """q(z | phi) of every gate."""
        if self.gate is HardConcrete:  # a check of values would wait for the device on each step
            return HardConcrete(parameters["log_alpha"], validate_args=False)
        return self.gate(parameters["log_alpha"])

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """log((1 - p) / p): alpha / (1 + alpha) is the probability to stay."""
        return {"log_alpha": (torch.log1p(-droprate) - droprate.log()).float()}

    def spread(self, parameters: GateParameters) -> None:
        """Normal around the locations."""
        location = parameters["log_alpha"]
        location.add_(INITIAL_DEVIATION * torch.randn_like(location))

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A differentiable sample (eqs. 10 and 11)."""
        return self.distribution(parameters).rsample(shape, generator=generator)

    def open_probability(self, parameters: GateParameters) -> Tensor:
        """1 - Q(0) (eqs. 6 and 12)."""
        return self.distribution(parameters).open_probability

    def mean(self, parameters: GateParameters) -> Tensor:
        """E[z]."""
        return self.distribution(parameters).mean

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        """See ``HardConcrete.readout``."""
        return self.distribution(parameters).readout(rule)

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """Locations far outside of where gates are random."""
        return {"log_alpha": torch.where(is_open, CERTAIN, -CERTAIN)}

    def removed(self, is_open: Tensor) -> dict[str, Tensor]:
        """Locations below those of all gates that are still there."""
        return {"log_alpha": torch.full(is_open.shape, REMOVED, device=is_open.device)}

    def divergence(self, parameters: GateParameters, prior: Any) -> Tensor:
        """KL(q(z) || p(z)) (eq. 21 and appendix C)."""
        return kl_divergence(self.distribution(parameters), prior)

    def refuse_prior(self, parameters: GateParameters, prior: Any) -> None:
        """Refuse all but a ``Rectified`` with the support of the gates."""
        if not isinstance(prior, Rectified):
            raise ArgumentError(
                "prior must be a Rectified such as HardConcrete.with_open_probability(0.1), "
                f"not {type(prior).__name__}"
            )
        gates = self.distribution(parameters)
        fits = prior.batch_shape in (torch.Size(), torch.Size([1]), gates.batch_shape)
        with torch.no_grad():
            finite = fits and kl_divergence(gates, prior).isfinite().all()
        if not finite:
            raise ArgumentError(
                "the prior must give every gate a finite divergence: the support of the gates, and "
                f"one entry or one per gate ({gates.batch_shape.numel()}); see appendix C of the "
                "paper"
            )

    def refuse_parameters(self, parameters: GateParameters, rule: str) -> None:
        """Refuse a ``gate`` that makes something other than one ``Rectified`` for all gates."""
        location = parameters["log_alpha"]
        gates = self.gate(location)
        if not isinstance(gates, Rectified):
            raise ArgumentError(
                f"gate must turn log_alpha into a Rectified, and gave {type(gates).__name__}"
            )
        if gates.batch_shape != location.shape:
            raise ArgumentError(
                f"gate must keep the shape of log_alpha, {list(location.shape)}, "
                f"and gave {list(gates.batch_shape)}"
            )
        gates.readout(rule)

    def is_flat(self, parameters: GateParameters) -> bool:
        """Whether the distribution is sampled as rectified ones are."""
        kind = type(self.distribution(parameters))
        return kind.rsample in FLAT and kind.icdf in FLAT


def _refuse_signature(gate: MakeRectified) -> None:
    """Refuse what takes nothing, or more than log_alpha."""
    try:
        inspect.signature(gate).bind(None)
    except TypeError as error:
        raise ArgumentError(f"gate must be callable on log_alpha alone: {error}") from error
    except ValueError:  # some builtins have no signature
        return
