"""Layers that read some of their inputs only, as gates on single inputs leave them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hardconcrete.compaction.forward_swap import swap_forward


def select_inputs(module: nn.Module, kept: tuple[int, ...]) -> None:
    """Let a dense or convolutional layer select its inputs, in place; again for other inputs."""
    index = torch.tensor(kept, dtype=torch.int64, device=module.weight.device)  # type: ignore[arg-type]
    if "kept_inputs" not in module._buffers:
        swap_forward(module, "Selecting", _select_and_compute)
    module.register_buffer("kept_inputs", index)


def read_all_inputs(module: Any) -> None:
    """Undo ``select_inputs``."""
    module.__class__ = type(module).base
    del module.kept_inputs


def _select_and_compute(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (as torch's layers)
    spatial = len(self.kernel_size) if isinstance(self, _ConvNd) else 0
    selected = input.index_select(input.dim() - 1 - spatial, self.kept_inputs)
    return type(self).base.forward(self, selected)  # type: ignore[no-any-return]
