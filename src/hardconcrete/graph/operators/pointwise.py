"""Elementwise operators: labels at the same index are united."""

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

KEEPS_ZERO = frozenset({
    "abs", "add", "alias", "celu", "ceil", "clone", "contiguous", "copy", "detach", "div",
    "dropout", "elu", "erf", "expm1", "feature_dropout", "floor", "fmod", "gelu", "hardswish",
    "leaky_relu", "lift_fresh_copy", "log1p", "maximum", "minimum", "mish", "mul", "neg", "prelu",
    "relu", "relu6", "round", "rrelu", "selu", "sign", "silu", "sin", "softshrink", "sqrt",
    "square", "sub", "tan", "tanh", "to", "_to_copy", "trunc", "type_as",
})  # fmt: skip
"""Operators whose result is 0 where all their tensors are 0, for any scalar arguments."""

LINEAR = frozenset({
    "alias", "clone", "contiguous", "detach", "div", "lift_fresh_copy", "mul", "neg", "to",
    "_to_copy",
})  # fmt: skip
"""Linear operators: where a parameter is zero, the result is zero."""

UNTAGGED_POINTWISE = (
    "clone", "contiguous", "detach", "alias", "to",
    "_to_copy", "copy", "fill", "masked_fill", "where", "type_as", "lift_fresh_copy", "add", "sub",
    "mul", "div", "rsub", "zero", "relu6", "hardtanh", "clamp", "lerp", "addcmul",
    "addcdiv", "gelu", "float_power", "pow", "softplus", "threshold", "clip", "nan_to_num",
    "logit", "celu", "selu", "hardswish", "hardsigmoid", "mish", "silu", "elu", "leaky_relu",
    "log_sigmoid", "softshrink", "hardshrink", "square", "relu",
)  # fmt: skip
"""Elementwise operators that some versions of torch do not tag as pointwise."""


@rule(*UNTAGGED_POINTWISE)
def pointwise(state: PropagationState, call: OperatorCall) -> Value:
    """Unite the labels at the same indices."""
    name = call.operator
    rank = len(call.shape)
    values = [value.with_rank(rank) for value in call.values]
    parts = state.merged(values, call.shape)
    from_parameters = all(value.from_parameters for value in values)
    if from_parameters:
        parts = [_with_source(call, values, part) for part in parts]
    else:
        for part in parts:
            if name not in KEEPS_ZERO or _adds_nonzero(call, values, part):
                state.labels.mark_zero_lost(part.labels)
    if len(parts) < max(
        (len(value.components) for value in values), default=0
    ):  # a dimension cannot shrink
        values = [state.simplified(value) for value in values]
    why = next((value.why_rigid for value in values if value.why_rigid), "")
    chosen = name in LINEAR and len(values) == 1 and call.values[0].chosen
    return Value(call.shape, tuple(parts), from_parameters, why, chosen)


def _adds_nonzero(call: OperatorCall, values: list[Value], part: Component) -> bool:
    """Whether it adds a nonzero number, or a tensor without the units of this component."""
    if call.operator not in ("add", "sub", "maximum", "minimum"):
        return False
    other = call.get("other")
    number = not isinstance(other, Value) and other != 0
    return number or any(
        not any(set(known.dims) & set(part.dims) for known in value.components) for value in values
    )


def _with_source(call: OperatorCall, values: list[Value], part: Component) -> Component:
    """Name the parameter axis of a component: that of the first factor that varies along it."""
    linear = call.operator in LINEAR
    factors = values[:1] if call.operator == "div" else values
    for value in factors:
        for source in value.components:
            if source.axis is not None and set(source.dims) & set(part.dims):
                follows = source.zero_with_parameter and linear
                return Component(part.labels, source.axis, follows)
    return Component(part.labels)


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
def dropout(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """Dropout is the identity in evaluation. If it is active anyway, its units are fixed."""
    if (call.get("train") or call.get("training")) and call.get("p") != 0:
        for value in call.values:
            state.fix(value, "a random number is drawn for each of them")
    return pointwise(state, call)


@rule("prelu", "_prelu_kernel")
def prelu(state: PropagationState, call: OperatorCall) -> Value:
    """PReLU, with one slope per channel along dimension 1, or one for all."""
    value, slopes = call.values
    rank = len(value.shape)
    if rank > 1 and len(slopes.shape) == 1:
        slopes = slopes.at_dims([1], rank)
    parts = state.merged([value, slopes.with_rank(rank)], call.shape)
    return Value(call.shape, tuple(Component(part.labels) for part in parts))
