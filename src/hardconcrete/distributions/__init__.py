"""The paper's distributions over gates: mathematics only, no module is known here."""

from hardconcrete.distributions import kl as _kl  # noqa: F401  (registers the divergences)
from hardconcrete.distributions.hard_concrete import HardConcrete
from hardconcrete.distributions.rectified import Rectified

__all__ = ["HardConcrete", "Rectified"]
