"""Fejer's quadrature: elementwise, differentiable and deterministic.

Nodes and weights are computed in every call. Constants copied to a device cannot be part of a
captured CUDA graph, and cached ones would outlive the fake tensors of a tracer.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

NODES = 32
"""The number of nodes in each panel."""


def integrate(function: Callable[[Tensor], Tensor], edges: Tensor) -> Tensor:
    """Integral of ``function`` from the first to the last of ``edges``, for every element.

    ``edges`` [panels + 1, ...] divide the interval into panels, on each of which the integrand is
    smooth; a panel may be empty. The function receives a tensor [panels, nodes, ...]. The weighted
    sum is no matrix product, because autocast would compute that in bf16.
    """
    nodes, weights = _fejer(edges)
    column = (-1,) + (1,) * (edges.dim() - 1)
    start, width = edges[:-1, None], edges.diff(dim=0)[:, None]
    values = function(start + width * nodes.view(column))
    column = (-1,) + (1,) * (values.dim() - 2)
    total: Tensor = (width * weights.view(column) * values).sum((0, 1))
    return total


def _fejer(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Fejer's first rule on (0, 1)."""
    angle = torch.arange(NODES, dtype=like.dtype, device=like.device)
    angle = (angle + 0.5) * (math.pi / NODES)
    order = torch.arange(1, NODES // 2 + 1, dtype=like.dtype, device=like.device)
    series = torch.cos(2 * angle[:, None] * order) / (4 * order.square() - 1)
    return (angle / 2).sin().square(), (1 - 2 * series.sum(1)) / NODES
