"""The user's batches: kept in memory, up to a number of examples."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hardconcrete.errors import ArgumentError

Loss = Callable[[nn.Module, Any], Tensor]
"""Calls the model on a batch and returns a scalar: ``lambda model, batch: model(**batch).loss``."""


def keep_batches(batches: Iterable[Any], examples: int) -> list[Any]:
    """The first batches, until they hold so many examples.

    Example:
        >>> import torch
        >>> len(keep_batches((torch.zeros(8, 3) for _ in range(100)), examples=20))
        3
    """
    if isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches is a {type(batches).__name__}; it takes an iterable of batches, such as a "
            "DataLoader"
        )
    if isinstance(batches, Tensor):
        raise ArgumentError("batches is one tensor; it takes several batches: [batch, ...]")
    kept, seen = [], 0
    for batch in batches:
        kept.append(batch)
        seen += batch_size(batch)
        if seen >= examples:
            break
    if not kept:
        raise ArgumentError("batches is empty; at least one batch is needed")
    return kept


def batch_size(batch: Any) -> int:
    """Examples in a batch: the first dimension of its first tensor; 1 if it has none.

    Example:
        >>> import torch
        >>> batch_size({"input_ids": torch.zeros(4, 7), "labels": torch.zeros(4)})
        4
    """
    leaves = (leaf for leaf in tree_leaves(_as_tree(batch)) if isinstance(leaf, Tensor))
    first = next((leaf for leaf in leaves if leaf.dim()), None)
    return 1 if first is None else len(first)


def _as_tree(batch: Any) -> Any:
    """A ``BatchEncoding`` is a mapping that pytrees do not know."""
    return dict(batch) if hasattr(batch, "keys") else batch


def check_loss(value: object) -> Tensor:
    """What ``loss(model, batch)`` returned, if it can be differentiated."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"loss(model, batch) must return a scalar tensor, and returned {shape}")
    if not value.requires_grad:
        raise ArgumentError(
            "loss(model, batch) returned a tensor without a gradient: it must call the model it is "
            "given, outside torch.no_grad()"
        )
    if not torch.isfinite(value):
        raise ArgumentError(f"loss(model, batch) returned {value.item()}; check the batches")
    return value.reshape(())
