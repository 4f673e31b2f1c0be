"""Calls of dense and convolutional operators as one thing: rows of inputs times a matrix.

Every such call is a least-squares problem: the rows X [row, group, in], the matrix W
[group, out, in] and the results Y = X W^T [row, group, out].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(eq=False)
class Contraction(ABC):
    """One call of an operator that multiplies inputs by a weight.

    Args:
        name: of the parameter that the weight is, or is a view of.
        weight: as the operator got it.
        bias: likewise, if it has one.
        inputs: the activations.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    inputs: Tensor

    @abstractmethod
    def matrix(self) -> Tensor:
        """The weight as [group, out, in]."""

    @abstractmethod
    def write(self, matrix: Tensor) -> None:
        """Put such a matrix in the place of the weight."""

    @property
    @abstractmethod
    def row_count(self) -> int:
        """How many rows the call has."""

    @abstractmethod
    def rows(self, places: Tensor, columns: Tensor) -> Tensor:
        """Some rows of the inputs, [row, group, in]; of one group only the masked columns."""

    @abstractmethod
    def results(self, output: Tensor, places: Tensor) -> Tensor:
        """The same rows of an output, [row, group, out]."""


class Dense(Contraction):
    """``x @ weight.T``, as ``F.linear`` has it.

    Example:
        >>> call = Dense("weight", torch.ones(1, 3), None, torch.arange(6.0).view(2, 3))
        >>> call.rows(torch.tensor([1]), torch.tensor([True, False, True])).tolist()
        [[[3.0, 5.0]]]
    """

    def matrix(self) -> Tensor:  # noqa: D102
        return self.weight[None]

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        self.weight.copy_(matrix[0])

    @property
    def row_count(self) -> int:  # noqa: D102
        return self.inputs.numel() // max(self.inputs.shape[-1], 1)

    def rows(self, places: Tensor, columns: Tensor) -> Tensor:  # noqa: D102
        return _as_rows(self.inputs)[places][:, None, columns]

    def results(self, output: Tensor, places: Tensor) -> Tensor:  # noqa: D102
        return _as_rows(output)[places][:, None]


class MatrixProduct(Dense):
    """``x @ weight``: the weight is [in, out].

    Example:
        >>> MatrixProduct("weight", torch.ones(3, 1), None, torch.ones(2, 3)).matrix().shape
        torch.Size([1, 1, 3])
    """

    def matrix(self) -> Tensor:  # noqa: D102
        return self.weight.T[None]

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        self.weight.copy_(matrix[0].T)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(eq=False)
class Convolution(Contraction):
    """A convolution of any rank; a transposed one is a convolution of its inputs spread apart.

    Args:
        padding: before and after, by dimension.
        spread: the stride of a transposed convolution.

    Example:
        >>> x, weight = torch.arange(5.0).view(1, 1, 5), torch.ones(1, 1, 3)
        >>> call = Convolution("weight", weight, None, x, (1,), ((0, 0),), (1,))
        >>> call.row_count, call.rows(torch.tensor([2]), torch.tensor([True] * 3)).tolist()
        (3, [[[2.0, 3.0, 4.0]]])
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    spread: tuple[int, ...] | None = None

    def matrix(self) -> Tensor:  # noqa: D102
        return self._filters(self.weight).flatten(2)

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        filters = matrix.reshape(self._filters(self.weight).shape)
        if self.spread is None:
            self.weight.copy_(filters.flatten(0, 1))
        else:
            self.weight.copy_(filters.flip(self._spatial).transpose(1, 2).flatten(0, 1))

    @property
    def row_count(self) -> int:  # noqa: D102
        return prod(self._positions)

    def rows(self, places: Tensor, columns: Tensor) -> Tensor:  # noqa: D102
        x, (_, *kernel) = self._batched(self.inputs), self._filters(self.weight).shape[2:]
        columns = columns.view(-1, prod(kernel))
        channels = columns.any(1)
        if self.groups == 1:
            x = x[:, channels]
        if self.spread is not None:
            x = _spread_apart(x, self.spread)
        x = F.pad(x, [side for pair in reversed(self.padding) for side in pair])
        patches: Tensor = x.movedim(1, -1)[self._patch_index(places, kernel)].movedim(-1, 1)
        rows = patches.reshape(len(places), self.groups, -1)
        return rows[:, :, columns[channels].flatten()] if self.groups == 1 else rows

    def results(self, output: Tensor, places: Tensor) -> Tensor:  # noqa: D102
        index = torch.unravel_index(places, self._positions)
        results = self._batched(output).movedim(1, -1)[index]
        return results.reshape(len(places), self.groups, -1)

    @property
    def _rank(self) -> int:
        return len(self.stride)

    @property
    def _spatial(self) -> tuple[int, ...]:
        return tuple(range(3, 3 + self._rank))

    def _filters(self, weight: Tensor) -> Tensor:
        """[group, out, in, *kernel]."""
        filters: Tensor = weight.unflatten(0, (self.groups, -1))
        return filters if self.spread is None else filters.transpose(1, 2).flip(self._spatial)

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.dim() == self._rank + 2 else x[None]

    @property
    def _positions(self) -> tuple[int, ...]:
        """Of the output: examples and positions."""
        x, kernel = self._batched(self.inputs), self.weight.shape[2:]
        sizes = []
        for k, length in enumerate(x.shape[2:]):
            if self.spread is not None:
                length = (length - 1) * self.spread[k] + 1
            reach = self.dilation[k] * (kernel[k] - 1)
            sizes.append((length + sum(self.padding[k]) - reach - 1) // self.stride[k] + 1)
        return (len(x), *sizes)

    def _patch_index(self, places: Tensor, kernel: Sequence[int]) -> tuple[Tensor, ...]:
        """For [example, *position] of the padded inputs: [row, *kernel] each."""
        example, *starts = torch.unravel_index(places, self._positions)
        column = (-1, *[1] * self._rank)
        index = [example.view(column)]
        for k, start in enumerate(starts):
            steps = self.dilation[k] * torch.arange(kernel[k], device=places.device)
            shape = [-1 if d == k else 1 for d in range(self._rank)]
            index.append(start.view(column) * self.stride[k] + steps.view(shape))
        return tuple(index)


def _spread_apart(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Zeros between neighbours, as a transposed convolution sees them."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    spread[:, :, *(slice(None, None, s) for s in stride)] = x
    return spread
