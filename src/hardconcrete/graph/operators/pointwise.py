"""Operators that combine tensors index by index: units at the same place become one."""

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

KEEPS_ZERO = frozenset({
    "abs", "add", "alias", "celu", "ceil", "clone", "contiguous", "copy", "detach", "div",
    "dropout", "elu", "erf", "expm1", "feature_dropout", "floor", "fmod", "gelu", "hardswish",
    "leaky_relu", "lift_fresh_copy", "log1p", "maximum", "minimum", "mish", "mul", "neg", "prelu",
    "relu", "relu6", "round", "rrelu", "selu", "sign", "silu", "sin", "softshrink", "sqrt",
    "square", "sub", "tan", "tanh", "to", "_to_copy", "trunc", "type_as",
})  # fmt: skip
"""Operators that give 0 where all their tensors are 0, whatever their numbers are."""

LINEAR = frozenset({
    "alias", "clone", "contiguous", "detach", "div", "lift_fresh_copy", "mul", "neg", "to",
    "_to_copy",
})  # fmt: skip
"""Operators through which a parameter that is zero stays zero."""

UNTAGGED = (
    "clone", "contiguous", "detach", "alias", "to",
    "_to_copy", "copy", "fill", "masked_fill", "where", "type_as", "lift_fresh_copy", "add", "sub",
    "mul", "div", "rsub", "zero", "relu6", "hardtanh", "clamp", "lerp", "addcmul",
    "addcdiv", "gelu", "float_power", "pow", "softplus", "threshold", "clip", "nan_to_num",
    "logit", "celu", "selu", "hardswish", "hardsigmoid", "mish", "silu", "elu", "leaky_relu",
    "log_sigmoid", "softshrink", "hardshrink", "square", "relu",
)  # fmt: skip
"""Pointwise operators that torch does not tag as such, in one version or another."""


@rule(*UNTAGGED)
def pointwise(scope: Scope, call: Call) -> Value:
    """Unite what lies at the same indices."""
    name = call.operator
    rank = len(call.shape)
    values = [value.aligned(rank) for value in call.values]
    parts = scope.merged(values, call.shape)
    weight = all(value.weight for value in values)
    if weight:
        parts = [_traced_back(call, values, part) for part in parts]
    else:
        for part in parts:
            if name not in KEEPS_ZERO or _adds_something_else(call, values, part):
                scope.labels.disturb(part.labels)
    why = next((value.why for value in values if value.why), "")
    return Value(call.shape, tuple(parts), weight, why)


def _adds_something_else(call: Call, values: list[Value], part: Component) -> bool:
    """Whether zeros meet a number, or a tensor that is no zero when the unit is."""
    if call.operator not in ("add", "sub", "maximum", "minimum"):
        return False
    other = call.get("other")
    number = not isinstance(other, Value) and other != 0
    return number or any(
        not any(set(own.dims) & set(part.dims) for own in value.components) for value in values
    )


def _traced_back(call: Call, values: list[Value], part: Component) -> Component:
    """The parameter that a component comes from: the first factor that varies along it."""
    faithful = call.operator in LINEAR
    factors = values[:1] if call.operator == "div" else values
    for value in factors:
        for own in value.components:
            if own.axis is not None and set(own.dims) & set(part.dims):
                return Component(part.labels, own.axis, own.faithful and faithful)
    return Component(part.labels)


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
def dropout(scope: Scope, call: Call) -> Value | list[Value]:
    """Nothing in evaluation; one that is never off draws other numbers for fewer units."""
    if (call.get("train") or call.get("training")) and call.get("p") != 0:
        for value in call.values:
            scope.fix(value, "a random number is drawn for each of them")
    return pointwise(scope, call)


@rule("prelu", "_prelu_kernel")
def prelu(scope: Scope, call: Call) -> Value:
    """Slopes lie along dimension 1, or there is one for all."""
    value, slopes = call.values
    rank = len(value.shape)
    if rank > 1 and len(slopes.shape) == 1:
        slopes = slopes.placed([1], rank)
    parts = scope.merged([value, slopes.aligned(rank)], call.shape)
    return Value(call.shape, tuple(Component(part.labels) for part in parts))
