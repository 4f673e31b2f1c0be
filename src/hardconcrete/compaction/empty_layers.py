"""Layers without inputs or outputs, as in a residual branch whose units are all removed."""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hardconcrete.compaction.forward_swap import swap_forward


def allow_empty(module: nn.Module) -> None:
    """Let a convolution or norm without channels compute its outputs, which torch refuses."""
    weight = getattr(module, "weight", None)
    is_empty = isinstance(weight, Tensor) and weight.numel() == 0
    if is_empty and isinstance(module, _ConvNd):
        swap_forward(module, "Empty", _empty_conv)
    elif isinstance(module, _NormBase) and module.num_features == 0:
        swap_forward(module, "Empty", _empty_norm)


def _empty_conv(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (the name torch's layers use)
    """Its bias everywhere: a sum over no input maps is zero."""
    spatial = len(self.kernel_size)
    size_of = _transposed_size if isinstance(self, _ConvTransposeNd) else _size
    sizes = [size_of(self, k, size) for k, size in enumerate(input.shape[-spatial:])]
    output = input.new_zeros(*input.shape[: -spatial - 1], self.out_channels, *sizes)
    return output if self.bias is None else output + self.bias.view(-1, *[1] * spatial)


def _size(module: Any, k: int, size: int) -> int:
    window = module.dilation[k] * (module.kernel_size[k] - 1) + 1
    return int((size + _padding(module)[k] - window) // module.stride[k] + 1)


def _transposed_size(module: Any, k: int, size: int) -> int:
    window = module.dilation[k] * (module.kernel_size[k] - 1) + 1
    inside = (size - 1) * module.stride[k] + window
    return int(inside - 2 * module.padding[k] + module.output_padding[k])


def _padding(module: Any) -> list[int]:
    """The padding of each dimension, both sides together."""
    if module.padding == "valid":
        return [0] * len(module.kernel_size)
    if module.padding == "same":
        return [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [2 * pad for pad in module.padding]


def _empty_norm(self: Any, input: Tensor) -> Tensor:  # noqa: A002, ARG001
    return input
