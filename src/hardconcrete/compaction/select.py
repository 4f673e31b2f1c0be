"""Layers that read some of their inputs only, as the paper's gates on single inputs leave them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


def selecting(module: nn.Module, kept: tuple[int, ...]) -> None:
    """Let a dense or convolutional layer select its inputs, in place."""
    kind: Any = type(module)
    index = torch.tensor(kept, dtype=torch.int64, device=module.weight.device)  # type: ignore[arg-type]
    module.register_buffer("kept_inputs", index)
    module.__class__ = _selecting_class(kind)


@cache
def _selecting_class(base: Any) -> type[nn.Module]:
    """The subclass of a layer that selects before it computes."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (the name torch's layers use)
        spatial = len(self.kernel_size) if isinstance(self, _ConvNd) else 0
        chosen = input.index_select(input.dim() - 1 - spatial, self.kept_inputs)
        return base.forward(self, chosen)  # type: ignore[no-any-return]

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001
        return _revive, (base,), self.__getstate__()

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__}
    return type(f"Selecting{base.__name__}", (base,), members)


def _revive(base: Any) -> nn.Module:
    kind = _selecting_class(base)
    return kind.__new__(kind)
