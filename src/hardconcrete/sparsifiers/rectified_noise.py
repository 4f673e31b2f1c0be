"""Gaussian and logistic noise, rectified to [0, 1]: the alternatives named in section 3."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    Normal,
    SigmoidTransform,
    TransformedDistribution,
    Uniform,
)

from hardconcrete.distributions import Rectified
from hardconcrete.sparsifiers.hard_concrete import RectifiedGates


class _RectifiedNoise(RectifiedGates):
    """z = min(1, max(0, location + scale * noise)), with symmetric noise."""

    readouts: ClassVar[tuple[str, ...]] = Rectified.readouts

    def __init__(self, scale: float) -> None:
        super().__init__(lambda location: Rectified(self.base(location), validate_args=False))
        self.scale = scale

    @abstractmethod
    def base(self, location: Tensor) -> Distribution:
        """The distribution of location + scale * noise."""

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """P(location + scale * noise > 1/2) is the probability to stay, as for hard concrete."""
        half = torch.full_like(droprate, 0.5)
        return {"log_alpha": self.base(half).icdf(1 - droprate).float()}


class RectifiedGaussian(_RectifiedNoise):
    """Gaussian noise. Hinton and Ghahramani 1997; as gates of features, Yamada et al. 2020.

    Args:
        scale: deviation of the noise. The default is that of Yamada et al.

    Example:
        >>> family = RectifiedGaussian()
        >>> family.readout(family.start(torch.tensor([0.05, 0.5, 0.9])), "median")
        tensor([1.0000, 0.5000, 0.0000])
    """

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__(scale)

    def base(self, location: Tensor) -> Distribution:
        """The normal distribution."""
        return Normal(location, self.scale, validate_args=False)


class RectifiedLogistic(_RectifiedNoise):
    """Logistic noise (Bengio et al. 2013).

    Args:
        scale: of the noise. The default has the deviation of ``RectifiedGaussian``, about 0.5.

    Example:
        >>> family = RectifiedLogistic()
        >>> family.readout(family.start(torch.tensor([0.05, 0.5, 0.9])), "median")
        tensor([1.0000, 0.5000, 0.0000])
    """

    def __init__(self, scale: float = 0.275) -> None:
        super().__init__(scale)

    def base(self, location: Tensor) -> Distribution:
        """The logistic distribution."""
        noise = Uniform(torch.zeros_like(location), 1.0, validate_args=False)
        moves = [SigmoidTransform().inv, AffineTransform(location, self.scale)]
        return TransformedDistribution(noise, moves, validate_args=False)
