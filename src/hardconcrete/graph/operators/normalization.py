"""Norms. Per-channel norms keep the labels; norms over channels fix the channels."""

from collections.abc import Sequence

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "native_batch_norm",
      "_batch_norm_impl_index", "cudnn_batch_norm")  # fmt: skip
def per_channel(state: PropagationState, call: OperatorCall) -> Value:
    """Statistics per channel. Dimension 1 keeps its labels, the others cannot shrink."""
    value: Value = call["input"]
    rank = len(value.shape)
    others = [dim for dim in range(rank) if dim != 1]
    value = state.keep_whole(value, others, f"{call.operator} reads all of them")
    return _scaled(state, call, value, [1], PER_CHANNEL)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def over_trailing(state: PropagationState, call: OperatorCall) -> Value:
    """Statistics over the last dimensions, which removing a unit would change."""
    value: Value = call["input"]
    rank, trailing = len(value.shape), len(call["normalized_shape"])
    dims = list(range(rank - trailing, rank))
    value = state.keep_whole(value, dims, f"{call.operator} normalises over all of them")
    return _scaled(state, call, value, dims, ("weight", "bias"))


@rule("group_norm")
def over_groups(state: PropagationState, call: OperatorCall) -> Value:
    """Statistics over groups of channels. Removing a channel would change them, so it goes with its
    group; the other groups do not notice.
    """
    value: Value = call["input"]
    rank, text = len(value.shape), f"{call.operator} normalises over groups of them"
    value = state.keep_whole(value, [dim for dim in range(rank) if dim != 1], text)
    for part in value.components_along(1):
        by_group = part.labels.unflatten(1, (call["num_groups"], -1))
        state.labels.unite(by_group, by_group[:, :, :1])
    return _scaled(state, call, state.simplified(value, text), [1], ("weight", "bias"))


@rule("native_group_norm")
def over_groups_at_once(state: PropagationState, call: OperatorCall) -> list[Value]:
    """The same operator with its statistics, one for each group: all channels stay."""
    for value in call.values:
        state.fix(value, f"{call.operator} normalises over groups of them")
    return [Value(shape) for shape in call.shapes]


def _scaled(
    state: PropagationState,
    call: OperatorCall,
    value: Value,
    dims: Sequence[int],
    names: Sequence[str],
) -> Value:
    """Apply parameters and running statistics elementwise along some dimensions."""
    rank = len(value.shape)
    tensors = [call.get(name) for name in names]
    aligned = [part.at_dims(dims, rank) for part in tensors if isinstance(part, Value)]
    parts = state.merged([value, *aligned], value.shape)
    for part in parts:
        state.labels.mark_zero_lost(part.labels)
    return Value(
        value.shape, tuple(Component(part.labels) for part in parts), why_rigid=value.why_rigid
    )


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """Weight norm g v / |v|: the norm reads all dimensions but ``dim``, or all if that is -1."""
    v, g = call["v"], call["g"].with_rank(len(call["v"].shape))
    others = [d for d in range(len(v.shape)) if d != call["dim"]]
    v = state.keep_whole(v, others, "the norm of the weight reads all of them")
    parts = state.merged([v, g], v.shape)
    axes = [part.axis for part in g.components]
    components = tuple(Component(part.labels, axes[0] if axes else None) for part in parts)
    made = Value(v.shape, components, True, v.why_rigid)
    return [made, Value(call.shapes[1])] if len(call.shapes) > 1 else made
