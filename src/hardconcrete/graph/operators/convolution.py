"""Convolutions: sums over input maps. Depthwise ones keep each map separate."""

from dataclasses import replace
from math import prod

from hardconcrete.graph.operators.contraction import record_contraction, with_bias
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

FEATURE_MAP = "feature map"
WINDOW = "a convolution window reads all of them"


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
      "conv_transpose3d", "_convolution")  # fmt: skip
def convolution(state: PropagationState, call: OperatorCall) -> Value:
    """A convolution of maps along dimension 1, or 0 without a batch."""
    value: Value = call.arguments.get("input") or call["self"]
    weight: Value = call["weight"]
    spatial = len(weight.shape) - 2
    channel = len(value.shape) - spatial - 1
    transposed = "transpose" in call.operator or bool(call.get("transposed", False))
    value = state.keep_whole(
        value,
        [d for d in range(len(value.shape)) if d != channel],
        WINDOW,
    )
    weight = state.make_sliceable(state.keep_whole(weight, range(2, len(weight.shape)), WINDOW))
    first, second = _channels(weight, 0), _channels(weight, 1)
    inputs, outputs = (first, second) if transposed else (second, first)
    x = _channels(value, channel)
    if call["groups"] == 1 or not _depthwise(weight, call["groups"], transposed):
        x = _unite_across_groups(state, x, call["groups"])
        parts = _grouped_components(state, call, x, inputs, outputs, weight)
    else:
        parts = _depthwise_components(state, call, x, inputs if transposed else outputs, outputs)
    shape = [1] * len(call.shape)
    shape[channel] = call.shape[channel]
    components = tuple(Component(part.labels.reshape(shape)) for part in parts)
    return with_bias(state, Value(call.shape, components), call["bias"], channel)


def _depthwise(weight: Value, groups: int, transposed: bool) -> bool:
    """Whether each group has one input map."""
    return (weight.shape[0] // groups if transposed else weight.shape[1]) == 1


def _channels(value: Value, dim: int) -> Value:
    """A vector with the labels of the channels of a tensor."""
    parts = [replace(part, labels=part.labels.reshape(-1)) for part in value.components_along(dim)]
    return Value((value.shape[dim],), tuple(parts), value.from_parameters, value.why_rigid)


def _unite_across_groups(state: PropagationState, value: Value, groups: int) -> Value:
    """Unite the k-th map of every group: all groups must keep the same number of maps."""
    for part in value.components:
        by_group = part.labels.reshape(groups, -1)
        state.labels.unite(by_group, by_group[:1])
    return state.simplified(value, "each group of the convolution has one of them")


def _grouped_components(
    state: PropagationState,
    call: OperatorCall,
    x: Value,
    inputs: Value,
    outputs: Value,
    weight: Value,
) -> list[Component]:
    """Each output map of a group reads each input map of that group."""
    groups = call["groups"]
    if (
        len(inputs.components) and inputs.shape[0] != x.shape[0]
    ):  # the kernel has the input maps of one group
        inputs = _tiled(inputs, groups)
    inputs = _unite_across_groups(state, inputs, groups)
    if outputs.shape[0] != call.shape[-len(weight.shape) + 1]:
        outputs = _tiled(outputs, groups)
    outputs = _unite_across_groups(state, outputs, groups)
    summed = state.merged([x, inputs], x.shape)
    readers = [part for part in inputs.components if part.axis and part.zero_with_parameter]
    if not readers:
        for part in summed:
            state.labels.fix(part.labels, state.reason("the kernel is not a parameter"))
    made = [part for part in outputs.components if part.axis]
    parts = [*(summed or inputs.components), *outputs.components]
    record_contraction(state, FEATURE_MAP, _macs(call, weight), parts, readers, made)
    return list(outputs.components)


def _tiled(value: Value, groups: int) -> Value:
    """Repeat the labels for each group."""
    parts = [replace(part, labels=part.labels.repeat(groups)) for part in value.components]
    return Value((value.shape[0] * groups,), tuple(parts), value.from_parameters)


def _depthwise_components(
    state: PropagationState, call: OperatorCall, x: Value, per_map: Value, outputs: Value
) -> list[Component]:
    """A depthwise convolution: an input map and its output maps are removed together."""
    groups = call["groups"]
    channel = len(call.shape) - (len(call["weight"].shape) - 2) - 1
    times = call.shape[channel] // groups
    parts = [replace(p, labels=p.labels.repeat_interleave(times)) for p in x.components]
    wide = Value((groups * times,), tuple(parts))
    if per_map is outputs:
        kernels = Value(wide.shape, outputs.components, True)
    else:  # transposed: dimension 0 is the input map, dimension 1 the outputs of one map
        kernels = Value(
            wide.shape,
            tuple(replace(p, labels=p.labels.repeat_interleave(times)) for p in per_map.components),
            True,
        )
        state.keep_whole(outputs, [0], "each map of a depthwise convolution has one of them")
    merged = state.merged([wide, kernels], wide.shape)
    record_contraction(state, FEATURE_MAP, _macs(call, call["weight"]), merged, [], [])
    return merged


def _macs(call: OperatorCall, weight: Value) -> int:
    """Entries of the kernel times positions of the output, or of the input if transposed."""
    transposed = "transpose" in call.operator or bool(call.get("transposed", False))
    value: Value = call.arguments.get("input") or call["self"]
    spatial = len(weight.shape) - 2
    shape = value.shape if transposed else call.shape
    batch = prod(shape[: len(shape) - spatial - 1])
    return prod(weight.shape) * prod(shape[len(shape) - spatial :]) * batch
