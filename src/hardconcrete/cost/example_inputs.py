"""Example inputs at another batch size."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hardconcrete.cost.count import tensors_in
from hardconcrete.errors import ArgumentError
from hardconcrete.graph.example_inputs import ExampleInputs


def batch_size(inputs: ExampleInputs) -> int:
    """The batch size: the length of the first tensor.

    Example:
        >>> batch_size(((torch.zeros(5, 3),), {"mask": torch.zeros(5)}))
        5
    """
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.dim() > 0]
    if not sizes or sizes[0] == 0:
        raise ArgumentError("the inputs need a tensor with at least one example along dimension 0")
    return sizes[0]


def resampled(inputs: ExampleInputs, size: int, batch: int) -> ExampleInputs:
    """Cut or repeat all tensors of length ``size`` to length ``batch``.

    Such a tensor has one row per example; other tensors stay as they are.

    Example:
        >>> resampled(((torch.tensor([1, 2]), torch.zeros(())), {}), size=2, batch=3)
        ((tensor([1, 2, 1]), tensor(0.)), {})
    """

    def rows(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) != size:
            return tensor
        return tensor.detach()[torch.arange(batch, device=tensor.device) % size]

    return tree_map_only(Tensor, rows, inputs)  # type: ignore[no-any-return]
