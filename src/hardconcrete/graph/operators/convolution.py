"""Convolutions: sums over input maps; depthwise ones carry their maps."""

from dataclasses import replace
from math import prod

from hardconcrete.graph.operators.contraction import note, with_bias
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

KIND = "feature map"


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
      "conv_transpose3d", "_convolution")  # fmt: skip
def convolution(scope: Scope, call: Call) -> Value:
    """Maps of the input along dimension 1, or 0 without a batch."""
    value: Value = call.arguments.get("input") or call["self"]
    weight: Value = call["weight"]
    spatial = len(weight.shape) - 2
    channel = len(value.shape) - spatial - 1
    transposed = "transpose" in call.operator or bool(call.get("transposed", False))
    value = scope.rigid(value, [d for d in range(len(value.shape)) if d != channel], "a window")
    weight = scope.rectangular(scope.rigid(weight, range(2, len(weight.shape)), "a window"))
    first, second = _channels(weight, 0), _channels(weight, 1)
    inputs, outputs = (first, second) if transposed else (second, first)
    x = _channels(value, channel)
    if call["groups"] == 1 or not _depthwise(weight, call["groups"], transposed):
        x = _kth(scope, x, call["groups"])
        parts = _full(scope, call, x, inputs, outputs, weight)
    else:
        parts = _carried(scope, call, x, inputs if transposed else outputs, outputs)
    shape = [1] * len(call.shape)
    shape[channel] = call.shape[channel]
    found = tuple(Component(part.labels.reshape(shape)) for part in parts)
    return with_bias(scope, Value(call.shape, found), call["bias"], channel)


def _depthwise(weight: Value, groups: int, transposed: bool) -> bool:
    """Whether every group has one input map."""
    return (weight.shape[0] // groups if transposed else weight.shape[1]) == 1


def _channels(value: Value, dim: int) -> Value:
    """A tensor as its channels alone."""
    parts = [replace(part, labels=part.labels.reshape(-1)) for part in value.along(dim)]
    return Value((value.shape[dim],), tuple(parts), value.weight)


def _kth(scope: Scope, value: Value, groups: int) -> Value:
    """In a grouped convolution the k-th map of every group is one unit: groups stay alike."""
    for part in value.components:
        by_group = part.labels.reshape(groups, -1)
        scope.labels.unite(by_group, by_group[:1])
    return scope.settled(value, "every group of the convolution has one of them")


def _full(
    scope: Scope, call: Call, x: Value, inputs: Value, outputs: Value, weight: Value
) -> list[Component]:
    """Every output map of a group reads every input map of it."""
    groups = call["groups"]
    if len(inputs.components) and inputs.shape[0] != x.shape[0]:  # one index for all groups
        inputs = _tiled(inputs, groups)
    inputs = _kth(scope, inputs, groups)
    if outputs.shape[0] != call.shape[-len(weight.shape) + 1]:
        outputs = _tiled(outputs, groups)
    outputs = _kth(scope, outputs, groups)
    read = scope.merged([x, inputs], x.shape)
    readers = [part for part in inputs.components if part.axis and part.faithful]
    if not readers:
        for part in read:
            scope.labels.fix(part.labels, scope.reason("the kernel is not a parameter"))
    made = [part for part in outputs.components if part.axis]
    note(scope, KIND, _macs(call, weight), [*read, *outputs.components], readers, made)
    return list(outputs.components)


def _tiled(value: Value, groups: int) -> Value:
    parts = [replace(part, labels=part.labels.repeat(groups)) for part in value.components]
    return Value((value.shape[0] * groups,), tuple(parts), value.weight)


def _carried(scope: Scope, call: Call, x: Value, per_map: Value, outputs: Value) -> list[Component]:
    """A depthwise convolution: each map has its own outputs, which live and die with it."""
    groups = call["groups"]
    channel = len(call.shape) - (len(call["weight"].shape) - 2) - 1
    times = call.shape[channel] // groups
    parts = [replace(p, labels=p.labels.repeat_interleave(times)) for p in x.components]
    wide = Value((groups * times,), tuple(parts))
    if per_map is outputs:
        kernels = Value(wide.shape, outputs.components, True)
    else:  # transposed: kernels by input map, whose second dimension counts outputs of one map
        kernels = Value(
            wide.shape,
            tuple(replace(p, labels=p.labels.repeat_interleave(times)) for p in per_map.components),
            True,
        )
        scope.rigid(outputs, [0], "each map of a depthwise convolution has one of them")
    merged = scope.merged([wide, kernels], wide.shape)
    note(scope, KIND, _macs(call, call["weight"]), merged, [], [])
    return merged


def _macs(call: Call, weight: Value) -> int:
    """Every entry of the kernel meets every position of the outputs, or inputs if transposed."""
    transposed = "transpose" in call.operator or bool(call.get("transposed", False))
    value: Value = call.arguments.get("input") or call["self"]
    spatial = len(weight.shape) - 2
    shape = value.shape if transposed else call.shape
    batch = prod(shape[: len(shape) - spatial - 1])
    return prod(weight.shape) * prod(shape[len(shape) - spatial :]) * batch
