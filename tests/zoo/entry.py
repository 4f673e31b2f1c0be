"""What the zoo says of one network, and the inputs that networks are traced with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Entry:
    """A network, and what must be found in it; every value is derived by hand.

    Attributes:
        name: unique in the zoo.
        build: a new model; its weights come from the global random state.
        inputs: batch size -> arguments and keyword arguments; the batch is dimension 0 of each.
        groups: name -> number of units, in the order in which the units are first produced.
        fixed: words that must occur in the reasons for what is fixed.
        form: what compaction delivers: the user's own classes, or the rewritten graph.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    groups: Mapping[str, int]
    fixed: tuple[str, ...] = ()
    form: str = "module"


def tensors(*shapes: tuple[int, ...]) -> Inputs:
    """Positional arguments, one for each shape (without its batch dimension)."""
    return lambda batch: (tuple(torch.randn(batch, *shape) for shape in shapes), {})


def tokens(vocabulary: int, length: int) -> Inputs:
    """One positional argument of token numbers."""
    return lambda batch: ((torch.randint(vocabulary, (batch, length)),), {})


def varied(entry: Entry) -> Entry:
    """The entry, its models without constant tensors: a wrong slice of ones would not show."""
    return replace(entry, build=partial(_build_varied, entry.build))


def _build_varied(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    for tensor in (*model.parameters(), *model.buffers()):
        if _is_constant(tensor):
            tensor.data.uniform_(0.5, 1.5)
    return model


def _is_constant(tensor: Tensor) -> bool:
    return (
        tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.max()).all())
    )
