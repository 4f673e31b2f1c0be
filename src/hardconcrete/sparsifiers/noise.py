"""What families share whose gates are noise that is never 0: a threshold decides."""

from typing import ClassVar

from torch import Tensor

from hardconcrete.sparsifiers.base import GateParameters, Sparsifier


class NoiseGates(Sparsifier):
    """Gates that are never 0 in a draw. Those below a threshold of the family are closed.

    They have no expected L0 norm, and no location for a budget: ``MethodPenalty`` trains them.
    """

    has_l0: ClassVar[bool] = False

    def open_probability(self, parameters: GateParameters) -> Tensor:
        """1 for a gate above the threshold, else 0: the cost is that of the compacted model."""
        return self.is_open(parameters, self.readouts[0]).to(self.mean(parameters))

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:
        """The mean of an open gate."""
        return self.mean(parameters) * self.is_open(parameters, rule)
