"""What methods share that decide by the weights of a unit: its gate is a mark, 1 or 0."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from hardconcrete.sparsifiers.base import GateParameters, Sparsifier
from hardconcrete.sparsifiers.unit_weights import UnitWeights


class MarkedUnits(Sparsifier):
    """Gates that are 1 in training. ``MethodPenalty.step`` marks the units that stay.

    In evaluation the mark is the gate. A unit that goes may come back while training lasts.

    Attributes:
        proximal: whether the penalty acts by ``shrunk`` after each step, and not by its gradient.
    """

    readouts: ClassVar[tuple[str, ...]] = ("mark",)
    fixed: ClassVar[tuple[str, ...]] = ("mark",)
    has_l0: ClassVar[bool] = False
    noiseless: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True
    proximal: ClassVar[bool] = False

    def start(self, droprate: Tensor) -> dict[str, Tensor]:
        """All units stay, whatever the drop rate."""
        return {"mark": torch.ones_like(droprate).float()}

    def sample(
        self,
        parameters: GateParameters,
        shape: tuple[int, ...] = (),
        generator: torch.Generator | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Ones."""
        return torch.ones_like(parameters["mark"]).expand(*shape, -1)

    def open_probability(self, parameters: GateParameters) -> Tensor:
        """The mark."""
        return parameters["mark"]

    def mean(self, parameters: GateParameters) -> Tensor:
        """Ones: a unit that is kept against its mark has its weights as they are."""
        return torch.ones_like(parameters["mark"])

    def variance(self, parameters: GateParameters) -> Tensor:
        """Zeros."""
        return torch.zeros_like(parameters["mark"])

    def readout(self, parameters: GateParameters, rule: str) -> Tensor:  # noqa: ARG002
        """The mark."""
        return parameters["mark"]

    def certain(self, is_open: Tensor) -> dict[str, Tensor]:
        """The mark."""
        return {"mark": is_open.float()}

    @abstractmethod
    def keeps(self, parameters: GateParameters, weights: UnitWeights) -> Tensor:
        """The new marks: 1 for units that stay, else 0."""

    def shrunk(self, rows: Tensor, amount: float) -> Tensor:
        """The weights after a proximal step: argmin of |w - rows|^2 / 2 + amount * penalty(w)."""
        raise NotImplementedError(f"{type(self).__name__} is proximal and must define shrunk")


def nonzero_rows(weights: UnitWeights) -> Tensor:
    """1 for units with a weight other than 0, else 0."""
    return torch.cat([rows.any(1) for rows in weights.rows]).float()
