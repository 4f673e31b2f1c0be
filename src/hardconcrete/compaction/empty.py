"""Layers that have nothing left to read or to make, as in a residual branch that is shut."""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def emptied(module: nn.Module) -> None:
    """Let a convolution or norm without channels compute what it means; torch refuses to."""
    weight = getattr(module, "weight", None)
    nothing = isinstance(weight, Tensor) and weight.numel() == 0
    if nothing and isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
        module.__class__ = _empty_class(type(module), _empty_conv)
    elif isinstance(module, _NormBase) and module.num_features == 0:
        module.__class__ = _empty_class(type(module), _empty_norm)


def _empty_conv(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (the name torch's layers use)
    """Its bias everywhere: a sum over no input maps is zero."""
    spatial = len(self.kernel_size)
    padding = _padding(self)
    sizes = [
        (size + padding[k] - self.dilation[k] * (self.kernel_size[k] - 1) - 1) // self.stride[k] + 1
        for k, size in enumerate(input.shape[-spatial:])
    ]
    output = input.new_zeros(*input.shape[: -spatial - 1], self.out_channels, *sizes)
    return output if self.bias is None else output + self.bias.view(-1, *[1] * spatial)


def _padding(module: Any) -> list[int]:
    """What is added to each size, both sides together."""
    if module.padding == "valid":
        return [0] * len(module.kernel_size)
    if module.padding == "same":
        return [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [2 * pad for pad in module.padding]


def _empty_norm(self: Any, input: Tensor) -> Tensor:  # noqa: A002, ARG001
    return input


@cache
def _empty_class(base: Any, forward: Any) -> type[nn.Module]:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001
        return _revive, (base, forward), self.__getstate__()

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__}
    return type(f"Empty{base.__name__}", (base,), members)


def _revive(base: Any, forward: Any) -> nn.Module:
    kind = _empty_class(base, forward)
    return kind.__new__(kind)
