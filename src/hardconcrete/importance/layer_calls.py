"""A call of a dense or convolutional operator as rows of inputs times a weight matrix.

Each call is a least-squares problem. It has the rows X [row, group, in], the matrix W
[group, out, in] and the outputs Y = X W^T [row, group, out].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(eq=False)
class LayerCall(ABC):
    """One call of an operator that multiplies inputs by a weight.

    Args:
        name: the parameter that the weight is, or is a view of.
        weight: the weight as passed to the operator.
        bias: the bias as passed to the operator, if any.
        inputs: the input activations.
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
        """Overwrite the weight, in place, with a matrix [group, out, in]."""

    @property
    @abstractmethod
    def positions(self) -> tuple[int, ...]:
        """The sizes of the output without its features; each row is one position."""

    @property
    def row_count(self) -> int:
        """The number of rows of the call."""
        return prod(self.positions)

    @abstractmethod
    def rows(self, index: Tensor, columns: Tensor) -> Tensor:
        """The input rows at an index, [row, group, in].

        Args:
            index: row numbers.
            columns: a mask of the inputs to return. It is ignored for grouped convolutions.
        """

    @abstractmethod
    def output_rows(self, output: Tensor, index: Tensor) -> Tensor:
        """The rows of an output at the same index, [row, group, out]."""


class LinearCall(LayerCall):
    """``x @ weight.T``, as in ``F.linear``.

    Example:
        >>> call = LinearCall("weight", torch.ones(1, 3), None, torch.arange(6.0).view(2, 3))
        >>> call.rows(torch.tensor([1]), torch.tensor([True, False, True])).tolist()
        [[[3.0, 5.0]]]
    """

    def matrix(self) -> Tensor:  # noqa: D102
        return self.weight[None]

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        self.weight.copy_(matrix[0])

    @property
    def positions(self) -> tuple[int, ...]:  # noqa: D102
        return tuple(self.inputs.shape[:-1])

    def rows(self, index: Tensor, columns: Tensor) -> Tensor:  # noqa: D102
        return _flatten_rows(self.inputs)[index][:, None, columns]

    def output_rows(self, output: Tensor, index: Tensor) -> Tensor:  # noqa: D102
        return _flatten_rows(output)[index][:, None]


class MatmulCall(LinearCall):
    """``x @ weight``, where the weight is [in, out].

    Example:
        >>> MatmulCall("weight", torch.ones(3, 1), None, torch.ones(2, 3)).matrix().shape
        torch.Size([1, 1, 3])
    """

    def matrix(self) -> Tensor:  # noqa: D102
        return self.weight.T[None]

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        self.weight.copy_(matrix[0].T)


def _flatten_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(eq=False)
class ConvCall(LayerCall):
    """A convolution of any rank.

    A transposed convolution is a convolution of its inputs with zeros between them.

    Args:
        padding: before and after, for each dimension.
        input_stride: the stride of a transposed convolution; None for a plain one.

    Example:
        >>> x, weight = torch.arange(5.0).view(1, 1, 5), torch.ones(1, 1, 3)
        >>> call = ConvCall("weight", weight, None, x, (1,), ((0, 0),), (1,))
        >>> call.row_count, call.rows(torch.tensor([2]), torch.tensor([True] * 3)).tolist()
        (3, [[[2.0, 3.0, 4.0]]])
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    input_stride: tuple[int, ...] | None = None

    def matrix(self) -> Tensor:  # noqa: D102
        return self._filters(self.weight).flatten(2)

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        filters = matrix.reshape(self._filters(self.weight).shape)
        if self.input_stride is None:
            self.weight.copy_(filters.flatten(0, 1))
        else:
            self.weight.copy_(filters.flip(self._spatial).transpose(1, 2).flatten(0, 1))

    def rows(self, index: Tensor, columns: Tensor) -> Tensor:  # noqa: D102
        x, (_, *kernel) = self._batched(self.inputs), self._filters(self.weight).shape[2:]
        columns = columns.view(-1, prod(kernel))
        channels = columns.any(1)
        if self.groups == 1:
            x = x[:, channels]
        if self.input_stride is not None:
            x = _insert_zeros(x, self.input_stride)
        x = F.pad(x, [side for pair in reversed(self.padding) for side in pair])
        patches: Tensor = x.movedim(1, -1)[self._patch_index(index, kernel)].movedim(-1, 1)
        rows = patches.reshape(len(index), self.groups, -1)
        return rows[:, :, columns[channels].flatten()] if self.groups == 1 else rows

    def output_rows(self, output: Tensor, index: Tensor) -> Tensor:  # noqa: D102
        positions = torch.unravel_index(index, self.positions)
        rows = self._batched(output).movedim(1, -1)[positions]
        return rows.reshape(len(index), self.groups, -1)

    @property
    def _rank(self) -> int:
        return len(self.stride)

    @property
    def _spatial(self) -> tuple[int, ...]:
        return tuple(range(3, 3 + self._rank))

    def _filters(self, weight: Tensor) -> Tensor:
        """The weight as [group, out, in, *kernel]."""
        filters: Tensor = weight.unflatten(0, (self.groups, -1))
        if self.input_stride is None:
            return filters
        return filters.transpose(1, 2).flip(self._spatial)

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.dim() == self._rank + 2 else x[None]

    @property
    def positions(self) -> tuple[int, ...]:  # noqa: D102
        x, kernel = self._batched(self.inputs), self.weight.shape[2:]
        sizes = []
        for k, length in enumerate(x.shape[2:]):
            if self.input_stride is not None:
                length = (length - 1) * self.input_stride[k] + 1
            reach = self.dilation[k] * (kernel[k] - 1)
            sizes.append((length + sum(self.padding[k]) - reach - 1) // self.stride[k] + 1)
        return (len(x), *sizes)

    def _patch_index(self, index: Tensor, kernel: Sequence[int]) -> tuple[Tensor, ...]:
        """Indices into the padded inputs [example, *position], each [row, *kernel]."""
        example, *starts = torch.unravel_index(index, self.positions)
        column = (-1, *[1] * self._rank)
        indices = [example.view(column)]
        for k, start in enumerate(starts):
            steps = self.dilation[k] * torch.arange(kernel[k], device=index.device)
            shape = [-1 if d == k else 1 for d in range(self._rank)]
            indices.append(start.view(column) * self.stride[k] + steps.view(shape))
        return tuple(indices)


def _insert_zeros(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Put zeros between neighbours, as a transposed convolution does."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    spread[:, :, *(slice(None, None, s) for s in stride)] = x
    return spread
