"""Fejer's quadrature, elementwise, differentiable, and the same value on every call.

Nodes and weights are computed where they are used: constants copied to a device could not be part
of a captured CUDA graph, and cached ones would outlive the fake tensors of a tracer.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

NODES = 32
"""Nodes in a panel: 1e-14 on the analytic integrands of a hard concrete with temperature <= 1."""


def integrate(
    function: Callable[[Tensor], Tensor], lower: Tensor, upper: Tensor, *, panels: int = 1
) -> Tensor:
    """Integral of ``function`` from ``lower`` to ``upper``, for every element of these.

    The interval is cut into equal panels of ``NODES`` nodes. The function receives its arguments
    with one more dimension in front, that of the nodes. A product and a sum, not a matrix product:
    autocast would compute the latter in bf16.
    """
    nodes, weights = _fejer(lower)
    offsets = torch.arange(panels, dtype=lower.dtype, device=lower.device)
    nodes = ((offsets[:, None] + nodes) / panels).view(-1, *[1] * lower.dim())
    values = function(lower + (upper - lower) * nodes).unflatten(0, (panels, NODES))
    weights = weights.view(1, -1, *[1] * (values.dim() - 2)) / panels
    total: Tensor = (weights * values).sum((0, 1))
    return (upper - lower) * total


def _fejer(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Fejer's first rule on (0, 1)."""
    angle = torch.arange(NODES, dtype=like.dtype, device=like.device)
    angle = (angle + 0.5) * (math.pi / NODES)
    order = torch.arange(1, NODES // 2 + 1, dtype=like.dtype, device=like.device)
    series = torch.cos(2 * angle[:, None] * order) / (4 * order.square() - 1)
    return (angle / 2).sin().square(), (1 - 2 * series.sum(1)) / NODES
