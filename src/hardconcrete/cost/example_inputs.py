"""The same inputs in another number."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hardconcrete.cost.count import tensors_in
from hardconcrete.errors import ArgumentError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional inputs, and those by keyword."""


def batch_size(given: Inputs) -> int:
    """The length of the first tensor.

    Example:
        >>> batch_size(((torch.zeros(5, 3),), {"mask": torch.zeros(5)}))
        5
    """
    sizes = [len(tensor) for tensor in tensors_in(given) if tensor.dim() > 0]
    if not sizes or sizes[0] == 0:
        raise ArgumentError("inputs need a tensor with at least one example along dimension 0")
    return sizes[0]


def resampled(given: Inputs, size: int, batch: int) -> Inputs:
    """Tensors of length ``size``, which have a row per example, cut or repeated to ``batch``.

    Example:
        >>> resampled(((torch.tensor([1, 2]), torch.zeros(())), {}), size=2, batch=3)
        ((tensor([1, 2, 1]), tensor(0.)), {})
    """

    def rows(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) != size:
            return tensor
        return tensor.detach()[torch.arange(batch, device=tensor.device) % size]

    return tree_map_only(Tensor, rows, given)  # type: ignore[no-any-return]
