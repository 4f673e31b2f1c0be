"""Norms: per channel they are carried; over channels they need all of them."""

from collections.abc import Sequence

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "native_batch_norm",
      "_batch_norm_impl_index", "cudnn_batch_norm")  # fmt: skip
def per_channel(scope: Scope, call: Call) -> Value:
    """Statistics of each channel alone; dimension 1 is carried, the others are read whole."""
    value: Value = call["input"]
    rank = len(value.shape)
    others = [dim for dim in range(rank) if dim != 1]
    value = scope.rigid(value, others, f"{call.operator} reads all of them")
    return _scaled(scope, call, value, [1], PER_CHANNEL)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def over_trailing(scope: Scope, call: Call) -> Value:
    """Statistics over the last dimensions: removing a unit would change them."""
    value: Value = call["input"]
    rank, trailing = len(value.shape), len(call["normalized_shape"])
    dims = list(range(rank - trailing, rank))
    value = scope.rigid(value, dims, f"{call.operator} normalises over all of them")
    return _scaled(scope, call, value, dims, ("weight", "bias"))


@rule("group_norm", "native_group_norm")
def over_groups(scope: Scope, call: Call) -> Value:
    """Statistics over groups of channels: fixed."""
    value: Value = call["input"]
    value = scope.rigid(
        value, range(1, len(value.shape)), f"{call.operator} normalises over groups of them"
    )
    return _scaled(scope, call, value, [1], ("weight", "bias"))


def _scaled(
    scope: Scope, call: Call, value: Value, dims: Sequence[int], names: Sequence[str]
) -> Value:
    """Parameters and statistics at some dimensions are applied index by index."""
    rank = len(value.shape)
    own = [call.get(name) for name in names]
    placed = [part.placed(dims, rank) for part in own if isinstance(part, Value)]
    parts = scope.merged([value, *placed], value.shape)
    for part in parts:
        scope.labels.disturb(part.labels)
    return Value(value.shape, tuple(Component(part.labels) for part in parts), why=value.why)


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(scope: Scope, call: Call) -> Value | list[Value]:
    """G v / |v|: the norm reads all dimensions but one, or all where that one is -1."""
    v, g = call["v"], call["g"].aligned(len(call["v"].shape))
    others = [d for d in range(len(v.shape)) if d != call["dim"]]
    v = scope.rigid(v, others, "the norm of the weight reads all of them")
    parts = scope.merged([v, g], v.shape)
    axes = [part.axis for part in g.components]
    components = tuple(Component(part.labels, axes[0] if axes else None) for part in parts)
    made = Value(v.shape, components, True, v.why)
    return [made, Value(call.shapes[1])] if len(call.shapes) > 1 else made
