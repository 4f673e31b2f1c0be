"""Pooling, resizing, padding: space is read, channels are carried."""

from math import prod

import torch
from torch import Tensor

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

POOLS = [
    f"{kind}{dims}d"
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for dims in (1, 2, 3)
]
RESIZES = [
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact1d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
    "reflection_pad3d", "replication_pad3d",
]  # fmt: skip
SPATIAL = "a window or a resize reads its neighbours"


@rule(*POOLS, *[f"{pool}_with_indices" for pool in POOLS], *RESIZES)
def spatial(scope: Scope, call: Call) -> Value | list[Value]:
    """The last dimensions are space, as many as the name says."""
    value: Value = call.values[0]
    dims = int(
        next(c for c in reversed(call.operator.removesuffix("_with_indices")) if c.isdigit())
    )
    rank = len(value.shape)
    value = scope.rigid(value, range(rank - dims, rank), SPATIAL)
    found = Value(call.shape, tuple(Component(part.labels) for part in value.components))
    return [found] * len(call.shapes) if len(call.shapes) > 1 else found


@rule("constant_pad_nd", "pad")
def padded(scope: Scope, call: Call) -> Value:
    """Padding of channels adds new ones, which hold a constant; padding of space is carried."""
    value: Value = call["self"]
    pads = list(call["pad"])
    rank = len(value.shape)
    sides = {rank - 1 - k // 2: tuple(pads[k : k + 2]) for k in range(0, len(pads), 2)}
    if call.get("mode", "constant") != "constant":
        value = scope.rigid(value, [dim for dim, side in sides.items() if any(side)], SPATIAL)
    parts = []
    for part in value.components:
        labels = part.labels
        for dim in part.dims:
            before, after = sides.get(dim, (0, 0))
            if min(before, after) < 0:
                scope.fix(value, "padding cuts some off")
                return Value(call.shape)
            labels = _extended(scope, labels, dim, before, after)
        if call.get("value") not in (None, 0, 0.0):
            scope.labels.disturb(labels)
        parts.append(Component(labels))
    return Value(call.shape, tuple(parts))


def _extended(scope: Scope, labels: Tensor, dim: int, before: int, after: int) -> Tensor:
    """New labels on both sides."""

    def fresh(count: int) -> Tensor:
        shape = [*labels.shape[:dim], count, *labels.shape[dim + 1 :]]
        return scope.labels.fresh(prod(shape)).reshape(shape)

    return torch.cat([fresh(before), labels, fresh(after)], dim)
