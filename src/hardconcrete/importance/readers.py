"""How the arguments of a torch function become a contraction."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.importance.contractions import (
    Contraction,
    Convolution,
    Dense,
    MatrixProduct,
)

Arguments = dict[str, Any]
"""Of a call, by name."""

Reader = Callable[[str, Arguments], Contraction | None]


class Parameters:
    """Which parameter a tensor is, or is a view of.

    Example:
        >>> layer = nn.Linear(2, 6)
        >>> parameters = Parameters(layer)
        >>> parameters.name_of(layer.weight.chunk(3)[1]), parameters.name_of(torch.ones(6, 2))
        ('weight', None)
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_id: dict[int, str] = {}
        self._by_storage: dict[int, str] = {}
        for name, parameter in model.named_parameters():  # a tied one under its first name
            self._by_id[id(parameter)] = name
            if _has_storage(parameter):
                self._by_storage.setdefault(parameter.untyped_storage().data_ptr(), name)

    def name_of(self, tensor: Tensor) -> str | None:
        """The first name of the parameter; None for any other tensor."""
        name = self._by_id.get(id(tensor))
        if name is None and tensor._base is not None:
            name = self._by_id.get(id(tensor._base))
        if name is None and _has_storage(tensor):
            name = self._by_storage.get(tensor.untyped_storage().data_ptr())
        return name


def _has_storage(tensor: Tensor) -> bool:
    """Whether it lies in memory of its own kind: neither sparse, nor meta, nor empty, nor fake."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and not tensor.is_meta


def read_contraction(
    function: Any, args: tuple[Any, ...], kwargs: Arguments, parameters: Parameters
) -> Contraction | None:
    """What a call of a torch function contracts, if one side is a parameter or a view of one.

    Example:
        >>> layer, x = nn.Linear(3, 2), torch.ones(5, 3)
        >>> read_contraction(F.linear, (x, layer.weight), {}, Parameters(layer)).row_count
        5
    """
    if function not in READERS:
        return None
    arguments = _by_name(function, args, kwargs)
    weight, bias = arguments.get("weight"), arguments.get("bias")
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point():
        return None
    name = parameters.name_of(weight)
    if name is None or not (bias is None or parameters.name_of(bias)):
        return None
    return READERS[function](name, arguments)


def _by_name(function: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    aliases = _ADDMM if function is torch.addmm else _PRODUCT
    by_name = {aliases.get(name, name): value for name, value in kwargs.items()}
    return dict(zip(SIGNATURES[function], args, strict=False)) | by_name


def _dense(name: str, arguments: Arguments) -> Contraction:
    return Dense(name, arguments["weight"], arguments.get("bias"), arguments["input"])


def _product(name: str, arguments: Arguments) -> Contraction | None:
    weight, bias, x = arguments["weight"], arguments.get("bias"), arguments.get("input")
    plain = arguments.get("beta", 1) == 1 and arguments.get("alpha", 1) == 1
    if weight.dim() != 2 or not plain or not isinstance(x, Tensor):
        return None
    if bias is not None and bias.numel() != weight.shape[1]:
        return None
    return MatrixProduct(name, weight, bias, x)


def _convolution(name: str, arguments: Arguments) -> Contraction:
    weight, rank = arguments["weight"], arguments["weight"].dim() - 2
    dilation = _each(arguments.get("dilation", 1), rank)
    padding = arguments.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = tuple((t // 2, t - t // 2) for t in total)
    else:
        pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, rank))
    return Convolution(
        name,
        weight,
        arguments.get("bias"),
        arguments["input"],
        stride=_each(arguments.get("stride", 1), rank),
        padding=pads,
        dilation=dilation,
        groups=arguments.get("groups", 1),
    )


def _transposed(name: str, arguments: Arguments) -> Contraction:
    weight, rank = arguments["weight"], arguments["weight"].dim() - 2
    defaults = {"dilation": 1, "padding": 0, "output_padding": 0, "stride": 1}
    dilation, padding, extra, stride = (
        _each(arguments.get(key, value), rank) for key, value in defaults.items()
    )
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    return Convolution(
        name,
        weight,
        arguments.get("bias"),
        arguments["input"],
        stride=(1,) * rank,
        padding=tuple((r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)),
        dilation=dilation,
        groups=arguments.get("groups", 1),
        spread=stride,
    )


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """One number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


_PRODUCT = {"other": "weight", "mat2": "weight"}
_ADDMM = {"input": "bias", "mat1": "input", "mat2": "weight"}
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
)  # fmt: skip
_FORMS: tuple[tuple[Sequence[Any], Reader, tuple[str, ...]], ...] = (
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
