"""Pooling, resizing and padding: channels keep their labels, space cannot shrink."""

from math import prod

import torch
from torch import Tensor

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

POOLING = [
    f"{kind}{dims}d"
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for dims in (1, 2, 3)
]
RESIZING_AND_PADDING = [
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact1d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
    "reflection_pad3d", "replication_pad3d",
]  # fmt: skip
SPATIAL = "a window or a resize reads its neighbours"


@rule(*POOLING, *[f"{pool}_with_indices" for pool in POOLING], *RESIZING_AND_PADDING)
def spatial(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """The last one, two or three dimensions are space, as the operator's name says."""
    value: Value = call.values[0]
    dims = int(
        next(c for c in reversed(call.operator.removesuffix("_with_indices")) if c.isdigit())
    )
    rank = len(value.shape)
    value = state.keep_whole(value, range(rank - dims, rank), SPATIAL)
    result = Value(call.shape, tuple(Component(part.labels) for part in value.components))
    return [result] * len(call.shapes) if len(call.shapes) > 1 else result


@rule("constant_pad_nd", "pad")
def padded(state: PropagationState, call: OperatorCall) -> Value:
    """Padding. New channels get new labels, since they hold a constant."""
    value: Value = call["self"]
    pads = list(call["pad"])
    rank = len(value.shape)
    sides = {rank - 1 - k // 2: tuple(pads[k : k + 2]) for k in range(0, len(pads), 2)}
    if call.get("mode", "constant") != "constant":
        value = state.keep_whole(value, [dim for dim, side in sides.items() if any(side)], SPATIAL)
    parts = []
    for part in value.components:
        labels = part.labels
        for dim in part.dims:
            before, after = sides.get(dim, (0, 0))
            if min(before, after) < 0:
                state.fix(value, "negative padding cuts some off")
                return Value(call.shape)
            labels = _with_new_labels(state, labels, dim, before, after)
        if call.get("value") not in (None, 0, 0.0):
            state.labels.mark_zero_lost(labels)
        parts.append(Component(labels))
    return Value(call.shape, tuple(parts))


def _with_new_labels(
    state: PropagationState, labels: Tensor, dim: int, before: int, after: int
) -> Tensor:
    """Add new labels on both sides."""

    def fresh(count: int) -> Tensor:
        shape = [*labels.shape[:dim], count, *labels.shape[dim + 1 :]]
        return state.labels.fresh(prod(shape)).reshape(shape)

    return torch.cat([fresh(before), labels, fresh(after)], dim)
