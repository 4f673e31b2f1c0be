"""The paper's distributions over gates. This is mathematics only and uses no module."""

from hardconcrete.distributions import kl as _kl  # noqa: F401  (registers the divergences)
from hardconcrete.distributions.hard_concrete import HardConcrete
from hardconcrete.distributions.rectified import Rectified

__all__ = ["HardConcrete", "Rectified"]
