"""An axis: a dimension of a parameter or buffer, and the unit of each of its indices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Place = tuple[str, int]
"""Name and dimension of a parameter or buffer."""

NO_UNIT = -1
"""In place of a unit's number, for an index that belongs to no unit."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A dimension of a parameter or buffer, and the unit of each of its indices.

    Args:
        tensor: dotted name of the parameter or buffer.
        dim: its dimension, or None where every single entry is a unit.
        units: for each index the number of its unit, or -1; in the tensor's shape if dim is None.
        gated: whether gates multiply it. Otherwise it is only cut.

    Example:
        >>> axis = Axis("fc.weight", 1, torch.tensor([0, 0, 1, 1, -1]))
        >>> axis.expand(torch.tensor([0.5, 2.0]), fill=1.0)
        tensor([0.5000, 0.5000, 2.0000, 2.0000, 1.0000])
    """

    tensor: str
    dim: int | None
    units: Tensor
    gated: bool = True

    def __str__(self) -> str:
        return self.tensor if self.dim is None else f"{self.tensor}[{self.dim}]"

    @cached_property
    def is_one_to_one(self) -> bool:
        """Whether index k is unit k."""
        flat = self.units.flatten()
        return torch.equal(flat, torch.arange(len(flat)))

    def expand(self, values: Tensor, fill: float) -> Tensor:
        """The value of each index, from one value per unit, and ``fill`` where there is no unit."""
        if self.is_one_to_one:
            return values.reshape(self.units.shape)
        units = self.units.to(values.device)
        return torch.cat([values, values.new_full((1,), fill)])[units]

    def spread(self, values: Tensor, dims: int) -> Tensor:
        """One value per unit, in a shape that broadcasts over the tensor; 1 without a unit."""
        along = self.expand(values, fill=1.0)
        if self.dim is None:
            return along
        return along.reshape([-1 if dim == self.dim else 1 for dim in range(dims)])

    def squared_norms(self, tensor: Tensor, count: int) -> Tensor:
        """The sum of squares of the entries of each of ``count`` units."""
        squares = tensor.float().square()
        if self.dim is not None:
            squares = squares.transpose(0, self.dim).reshape(tensor.shape[self.dim], -1).sum(1)
        if self.is_one_to_one:
            return squares.flatten()
        units = self.units.to(squares.device)
        has_unit = units >= 0
        return squares.new_zeros(count).index_add(0, units[has_unit], squares[has_unit])

    def largest(self, values: Tensor, count: int) -> Tensor:
        """The largest value among the indices of each of ``count`` units, or 0."""
        has_unit = self.units >= 0
        top = values.expand(self.units.shape)[has_unit]
        return values.new_zeros(count).scatter_reduce(0, self.units[has_unit], top, "amax")

    def cut(self, kept: Mapping[int, Tensor]) -> "Axis":
        """The axis after the tensor keeps only these indices of some dimensions."""
        units = self.units
        if self.dim is not None:
            return replace(self, units=units[kept[self.dim]] if self.dim in kept else units)
        for dim, indices in kept.items():
            units = units.index_select(dim, indices)
        return replace(self, units=units)

    def renumbered(self, numbers: Tensor) -> "Axis":
        """The same axis with other numbers for its units; the last one is for no unit."""
        return replace(self, units=numbers[self.units])
