"""Your batches: the first ones are kept in memory."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hardconcrete.errors import ArgumentError

Loss = Callable[[nn.Module, Any], Tensor]
"""Calls the model on a batch and returns a scalar: ``lambda model, batch: model(**batch).loss``."""


def keep_batches(
    batches: Iterable[Any], examples: int | None = None, *, max_batches: int | None = None
) -> list[Any]:
    """The first batches, until they hold enough examples.

    Tensors made in ``torch.inference_mode()`` are copied, because autograd refuses them.

    Args:
        batches: any iterable; only the batches that are kept are read from it.
        examples: stop when the batches hold this many examples; None for no limit.
        max_batches: stop after this many batches; None for no limit.

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
    kept: list[Any] = []
    seen = 0
    for batch in itertools.islice(batches, max_batches):
        kept.append(tree_map(_usable_by_autograd, batch))
        seen += batch_size(batch)
        if examples is not None and seen >= examples:
            break
    if not kept:
        raise ArgumentError("batches is empty; at least one batch is needed")
    return kept


def _usable_by_autograd(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def batch_size(batch: Any) -> int:
    """The number of examples: the first dimension of the first tensor; 1 without a tensor.

    Example:
        >>> import torch
        >>> batch_size({"input_ids": torch.zeros(4, 7), "labels": torch.zeros(4)})
        4
    """
    tree = dict(batch) if hasattr(batch, "keys") else batch  # a BatchEncoding is no pytree
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    first = next((leaf for leaf in leaves if leaf.dim()), None)
    return 1 if first is None else len(first)


def check_loss(value: object) -> Tensor:
    """The value that ``loss(model, batch)`` returned, as a scalar; refuse what has no gradient.

    Example:
        >>> import torch
        >>> try:
        ...     check_loss(torch.ones(3))
        ... except ArgumentError as error:
        ...     print(error)
        loss(model, batch) must return a scalar tensor, and returned [3]
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"loss(model, batch) must return a scalar tensor, and returned {shape}")
    if not value.requires_grad:
        raise ArgumentError(
            "loss(model, batch) returned a tensor without a gradient: it must call the model "
            "that is passed to it, outside torch.no_grad()"
        )
    if not torch.isfinite(value):
        raise ArgumentError(f"loss(model, batch) returned {value.item()}; check the batches")
    return value.reshape(())
