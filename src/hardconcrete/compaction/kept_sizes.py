"""Sizes of traced tensors after their units were removed."""

import torch
from torch import Tensor

from hardconcrete.graph.values import Value
from hardconcrete.units.liveness import Liveness


def size_after_cuts(liveness: Liveness, value: Value, dim: int) -> int:
    """The size of a dimension after the cuts."""
    return int(kept_indices(liveness, value, dim).sum())


def kept_indices(liveness: Liveness, value: Value, dim: int) -> Tensor:
    """Which indices of a dimension of a traced tensor stay."""
    parts = value.components_along(dim)
    if not parts:
        return torch.ones(value.shape[dim], dtype=torch.bool)
    dead = torch.tensor(sorted(liveness.dead), dtype=torch.int64)
    roots = liveness.labelled.state.labels.find(parts[0].labels)
    for other in range(len(value.shape)):
        if other != dim:
            roots = roots.narrow(other, 0, 1)
    return ~torch.isin(roots.reshape(-1), dead)
