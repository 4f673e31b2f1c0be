"""Cuts of tensors that are being trained, with their gradients and the state of optimizers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from hardconcrete.errors import ArgumentError, CompactionError


class TensorCutter:
    """Keeps some indices of a parameter, of its gradient and of its state in optimizers.

    A parameter stays the same object: optimizers, schedulers and averages refer to it as before.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self.optimizers = optimizers

    def __call__(self, tensor: Tensor, dim: int, kept: Tensor) -> None:
        """Keep these indices along a dimension, in place."""
        kept = kept.to(tensor.device)
        for optimizer in self.optimizers:
            state = optimizer.state.get(tensor, {})
            for name, value in state.items():
                state[name] = tree_map_only(
                    Tensor,
                    lambda leaf: _select(leaf, dim, kept) if leaf.shape == tensor.shape else leaf,
                    value,
                )
        gradient, tensor.grad = tensor.grad, None
        _replace_data(tensor, _select(tensor.data, dim, kept))
        if gradient is not None:
            tensor.grad = _select(gradient, dim, kept)


def _select(tensor: Tensor, dim: int, kept: Tensor) -> Tensor:
    """Some indices along a dimension, in the same memory layout, which index_select drops."""
    selected = tensor.index_select(dim, kept.to(tensor.device))
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if last and not tensor.is_contiguous():
        return selected.contiguous(memory_format=torch.channels_last)
    return selected


def _replace_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data.

    Another type in between lets autograd drop the old shape, which an earlier loss may still hold.
    """
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    if tensor.requires_grad:
        tensor.data = data.new_empty(0, dtype=other)
    tensor.data = data


def refuse_unknown_state(
    optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]
) -> None:
    """Refuse an optimizer of another model, and one whose state has other shapes."""
    known = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"optimizer takes a torch.optim.Optimizer, not {optimizer!r}")
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in known for parameter in trained):
            raise ArgumentError(
                f"this {type(optimizer).__name__} trains no parameter of the gated model"
            )
        for parameter, state in optimizer.state.items():
            for leaf in tree_leaves(state):
                if isinstance(leaf, Tensor) and leaf.numel() > 1 and leaf.shape != parameter.shape:
                    raise CompactionError(
                        f"{type(optimizer).__name__} keeps a tensor of shape {list(leaf.shape)} for"
                        f" a parameter of shape {list(parameter.shape)}, which cannot be cut with "
                        "it; use an optimizer with state of the shape of its parameters"
                    )
