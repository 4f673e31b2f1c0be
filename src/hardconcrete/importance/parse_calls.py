"""From the arguments of a torch function to a ``LayerCall``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.importance.layer_calls import ConvCall, LayerCall, LinearCall, MatmulCall

Arguments = dict[str, Any]
"""The arguments of a call, by name."""

Parser = Callable[[str, Arguments], LayerCall | None]
"""Takes the name of the parameter that is the weight, and the arguments."""


class ParameterNames:
    """Finds the name of the parameter that a tensor is, or is a view of.

    Example:
        >>> layer = nn.Linear(2, 6)
        >>> names = ParameterNames(layer)
        >>> names.of(layer.weight.chunk(3)[1]), names.of(torch.ones(6, 2))
        ('weight', None)
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_id: dict[int, str] = {}
        self._by_storage: dict[int, str] = {}
        for name, parameter in model.named_parameters():  # tied parameters: the first name
            self._by_id[id(parameter)] = name
            if _has_storage(parameter):
                self._by_storage.setdefault(parameter.untyped_storage().data_ptr(), name)

    def of(self, tensor: Tensor) -> str | None:
        """The first name of the parameter; None for any other tensor."""
        name = self._by_id.get(id(tensor))
        if name is None and tensor._base is not None:
            name = self._by_id.get(id(tensor._base))
        if name is None and _has_storage(tensor):
            name = self._by_storage.get(tensor.untyped_storage().data_ptr())
        return name


def _has_storage(tensor: Tensor) -> bool:
    """Whether its memory can be compared: not sparse, meta, empty or fake."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and not tensor.is_meta


def layer_call_of(
    function: Any, args: tuple[Any, ...], kwargs: Arguments, names: ParameterNames
) -> LayerCall | None:
    """The call as a ``LayerCall``, if its weight is a parameter or a view of one; else None.

    Example:
        >>> layer, x = nn.Linear(3, 2), torch.ones(5, 3)
        >>> layer_call_of(F.linear, (x, layer.weight), {}, ParameterNames(layer)).row_count
        5
    """
    if function not in PARSERS:
        return None
    arguments = _arguments_by_name(function, args, kwargs)
    weight, bias = arguments.get("weight"), arguments.get("bias")
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point():
        return None
    name = names.of(weight)
    if name is None or not (bias is None or names.of(bias)):
        return None
    return PARSERS[function](name, arguments)


def _arguments_by_name(function: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    aliases = _ADDMM_ALIASES if function is torch.addmm else _MATMUL_ALIASES
    by_name = {aliases.get(name, name): value for name, value in kwargs.items()}
    return dict(zip(ARGUMENT_NAMES[function], args, strict=False)) | by_name


def _linear(name: str, arguments: Arguments) -> LayerCall:
    return LinearCall(name, arguments["weight"], arguments.get("bias"), arguments["input"])


def _matmul(name: str, arguments: Arguments) -> LayerCall | None:
    weight, bias, x = arguments["weight"], arguments.get("bias"), arguments.get("input")
    plain = arguments.get("beta", 1) == 1 and arguments.get("alpha", 1) == 1
    if weight.dim() != 2 or not plain or not isinstance(x, Tensor):
        return None
    if bias is not None and bias.numel() != weight.shape[1]:
        return None
    return MatmulCall(name, weight, bias, x)


def _conv(name: str, arguments: Arguments) -> LayerCall:
    weight, rank = arguments["weight"], arguments["weight"].dim() - 2
    dilation = _per_dimension(arguments.get("dilation", 1), rank)
    padding = arguments.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = tuple((t // 2, t - t // 2) for t in total)
    else:
        pads = tuple((p, p) for p in _per_dimension(0 if padding == "valid" else padding, rank))
    return ConvCall(
        name,
        weight,
        arguments.get("bias"),
        arguments["input"],
        stride=_per_dimension(arguments.get("stride", 1), rank),
        padding=pads,
        dilation=dilation,
        groups=arguments.get("groups", 1),
    )


def _conv_transpose(name: str, arguments: Arguments) -> LayerCall:
    weight, rank = arguments["weight"], arguments["weight"].dim() - 2
    defaults = {"dilation": 1, "padding": 0, "output_padding": 0, "stride": 1}
    dilation, padding, extra, stride = (
        _per_dimension(arguments.get(key, value), rank) for key, value in defaults.items()
    )
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    return ConvCall(
        name,
        weight,
        arguments.get("bias"),
        arguments["input"],
        stride=(1,) * rank,
        padding=tuple((r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)),
        dilation=dilation,
        groups=arguments.get("groups", 1),
        input_stride=stride,
    )


def _per_dimension(value: Any, rank: int) -> tuple[int, ...]:
    """One number for each of the spatial dimensions."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


_MATMUL_ALIASES = {"other": "weight", "mat2": "weight"}
_ADDMM_ALIASES = {"input": "bias", "mat1": "input", "mat2": "weight"}
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE_ARGUMENTS = (
    "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
)  # fmt: skip
_OPERATORS: tuple[tuple[Sequence[Any], Parser, tuple[str, ...]], ...] = (
    ((F.linear,), _linear, ("input", "weight", "bias")),
    ((torch.conv1d, torch.conv2d, torch.conv3d), _conv, _CONV_ARGUMENTS),
    (
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        _conv_transpose,
        _CONV_TRANSPOSE_ARGUMENTS,
    ),
    (
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
        _matmul,
        ("input", "weight"),
    ),
    ((torch.addmm,), _matmul, ("bias", "input", "weight")),
)
PARSERS = {function: parser for functions, parser, _ in _OPERATORS for function in functions}
"""For each torch function, what turns its arguments into a ``LayerCall``."""

ARGUMENT_NAMES = {function: names for functions, _, names in _OPERATORS for function in functions}
"""The positional arguments of each; the second matrix is called ``weight``."""
