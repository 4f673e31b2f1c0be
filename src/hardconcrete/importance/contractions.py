"""Calls of dense and convolutional operators as one thing: rows of inputs times a matrix.

Every such call is a least-squares problem waiting to be written down: the rows X [row, group, in],
the matrix W [group, out, in] and the results Y = X W^T [row, group, out].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(eq=False)
class Contraction:
    """One call of an operator that multiplies inputs by a weight.

    Args:
        name: of the parameter that the weight is, or is a view of.
        weight: as the operator got it.
        bias: likewise, if it has one.
        inputs: the activations.
        output: what came out, where it is known.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    output: Tensor | None = None

    def matrix(self) -> Tensor:
        """The weight as [group, out, in]."""
        raise NotImplementedError

    def write(self, matrix: Tensor) -> None:
        """Put such a matrix in the place of the weight."""
        raise NotImplementedError

    @property
    def rows_in_all(self) -> int:
        """How many rows the call has."""
        raise NotImplementedError

    def rows(self, places: Tensor, used: Tensor) -> Tensor:
        """Some rows of the inputs, [row, group, in]; of one group only the columns ``used``."""
        raise NotImplementedError

    def results(self, output: Tensor, places: Tensor) -> Tensor:
        """The same rows of an output, [row, group, out]."""
        raise NotImplementedError


class Dense(Contraction):
    """``x @ weight.T``; ``transposed`` says that the weight came as [in, out]."""

    transposed = False

    def matrix(self) -> Tensor:  # noqa: D102
        return (self.weight.T if self.transposed else self.weight)[None]

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        self.weight.copy_(matrix[0].T if self.transposed else matrix[0])

    @property
    def rows_in_all(self) -> int:  # noqa: D102
        return self.inputs.numel() // self.inputs.shape[-1]

    def rows(self, places: Tensor, used: Tensor) -> Tensor:  # noqa: D102
        return self.inputs.flatten(0, -2)[places][:, None, used].float()

    def results(self, output: Tensor, places: Tensor) -> Tensor:  # noqa: D102
        return output.flatten(0, -2)[places][:, None].float()


class MatrixProduct(Dense):
    """``x @ weight``."""

    transposed = True


@dataclass(eq=False)
class Convolution(Contraction):
    """A convolution of any rank; a transposed one is a convolution of its inputs spread apart."""

    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    spread: tuple[int, ...] | None = None

    @property
    def _rank(self) -> int:
        return len(self.stride)

    def matrix(self) -> Tensor:  # noqa: D102
        return self._filters().reshape(self.groups, -1, prod(self._filter_shape()))

    def write(self, matrix: Tensor) -> None:  # noqa: D102
        self._filters(matrix.reshape(self._filters().shape))

    def _filters(self, new: Tensor | None = None) -> Tensor:
        """[group, out, in, *kernel], read or written."""
        weight, spatial = self.weight, tuple(range(3, 3 + self._rank))
        if self.spread is None:
            if new is not None:
                weight.copy_(new.flatten(0, 1))
            return weight.unflatten(0, (self.groups, -1))
        if new is not None:
            weight.copy_(new.flip(spatial).transpose(1, 2).flatten(0, 1))
        return weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flip(spatial)

    def _filter_shape(self) -> tuple[int, ...]:
        return tuple(self._filters().shape[2:])

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.dim() == self._rank + 2 else x[None]

    @property
    def _places_shape(self) -> tuple[int, ...]:
        """Of the output: examples and positions."""
        x = self._batched(self.inputs)
        sizes = []
        for k in range(self._rank):
            length = x.shape[k + 2]
            if self.spread is not None:
                length = (length - 1) * self.spread[k] + 1
            reach = self.dilation[k] * (self._filter_shape()[k + 1] - 1)
            sizes.append((length + sum(self.padding[k]) - reach - 1) // self.stride[k] + 1)
        return (len(x), *sizes)

    @property
    def rows_in_all(self) -> int:  # noqa: D102
        return prod(self._places_shape)

    def rows(self, places: Tensor, used: Tensor) -> Tensor:  # noqa: D102
        x, kernel = self._batched(self.inputs), self._filter_shape()[1:]
        if self.groups == 1:  # only the channels that are read
            channels = used.view(-1, prod(kernel)).any(1)
            x, used = x[:, channels], used.view(-1, prod(kernel))[channels].flatten()
        if self.spread is not None:
            x = _spread_apart(x, self.spread)
        x = F.pad(x, [side for pair in reversed(self.padding) for side in pair])
        example, *position = torch.unravel_index(places, self._places_shape)
        index = [example.view(-1, *[1] * self._rank)]
        for k, start in enumerate(position):
            steps = self.dilation[k] * torch.arange(kernel[k], device=x.device)
            shape = [-1 if d == k else 1 for d in range(self._rank)]
            index.append(start.view(-1, *[1] * self._rank) * self.stride[k] + steps.view(shape))
        patches = x.movedim(1, -1)[tuple(index)].movedim(-1, 1)  # [row, channel, *kernel]
        patches = patches.reshape(len(places), self.groups, -1).float()
        return patches[:, :, used] if self.groups == 1 else patches

    def results(self, output: Tensor, places: Tensor) -> Tensor:  # noqa: D102
        output = self._batched(output).movedim(1, -1).flatten(0, -2)
        return output[places].unflatten(1, (self.groups, -1)).float()


def _spread_apart(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Zeros between neighbours, as a transposed convolution sees them."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    spread[(..., *(slice(None, None, s) for s in stride))] = x
    return spread


Reader = Callable[[tuple[Any, ...], dict[str, Any]], Contraction | None]


def read_contraction(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[int, str]
) -> Contraction | None:
    """What a call of a torch function contracts, if one side is a parameter or a view of one."""
    reader = READERS.get(function)
    if reader is None:
        return None
    given = dict(zip(SIGNATURES[function], args, strict=False)) | kwargs
    weight = given.get("weight")
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point():
        return None
    name = names.get(id(weight)) or names.get(id(weight._base))
    bias = given.get("bias")
    if name is None or not (bias is None or id(bias) in names or id(bias._base) in names):
        return None
    return reader(name, given)


def _dense(name: str, given: dict[str, Any]) -> Contraction:
    return Dense(name, given["weight"], given.get("bias"), given["input"])


def _product(name: str, given: dict[str, Any]) -> Contraction | None:
    plain = given.get("beta", 1) == 1 and given.get("alpha", 1) == 1
    if given["weight"].dim() != 2 or not plain:
        return None
    return MatrixProduct(name, given["weight"], given.get("bias"), given["input"])


def _convolution(name: str, given: dict[str, Any]) -> Contraction:
    weight, rank = given["weight"], given["weight"].dim() - 2
    dilation = _each(given.get("dilation", 1), rank)
    padding = given.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = tuple((t // 2, t - t // 2) for t in total)
    else:
        pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, rank))
    stride, groups = _each(given.get("stride", 1), rank), given.get("groups", 1)
    return Convolution(
        name, weight, given.get("bias"), given["input"], None, stride, pads, dilation, groups
    )


def _transposed(name: str, given: dict[str, Any]) -> Contraction:
    weight, rank = given["weight"], given["weight"].dim() - 2
    names = ("dilation", 1), ("padding", 0), ("output_padding", 0), ("stride", 1)
    dilation, padding, more, stride = (_each(given.get(n, value), rank) for n, value in names)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = tuple((r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True))
    ones, groups = (1,) * rank, given.get("groups", 1)
    return Convolution(
        name, weight, given.get("bias"), given["input"], None, ones, pads, dilation, groups, stride
    )


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """One number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
)  # fmt: skip
_FORMS: tuple[tuple[Sequence[Any], Any, tuple[str, ...]], ...] = (
    ((F.linear,), _dense, ("input", "weight", "bias")),
    ((torch.conv1d, torch.conv2d, torch.conv3d), _convolution, _CONV),
    (
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        _transposed,
        _TRANSPOSED,
    ),
    (
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
        _product,
        ("input", "weight"),
    ),
    ((torch.addmm,), _product, ("bias", "input", "weight")),
)
READERS = {function: reader for functions, reader, _ in _FORMS for function in functions}
"""By the torch function that is called, how its arguments become a contraction."""

SIGNATURES = {function: names for functions, _, names in _FORMS for function in functions}
"""Its positional arguments; a second matrix goes by the name of weight."""
