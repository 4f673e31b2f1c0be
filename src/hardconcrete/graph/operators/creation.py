"""Operators that create tensors. Indices of constants can be removed like those of a parameter."""

from math import prod

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

CONSTANT = "a constant that the forward makes, whose size does not follow"


@rule("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "empty", "new_empty")
def constant(state: PropagationState, call: OperatorCall) -> Value:
    """New labels along every dimension but the first: a smaller constant can replace it."""
    if not call.shape or prod(call.shape) <= 1:
        return Value(call.shape, (), True)
    parts = []
    rank = len(call.shape)
    for dim, size in enumerate(call.shape):
        if size > 1 and dim > 0:
            labels = state.labels.fresh(size)
            if call.operator not in ("zeros", "new_zeros"):
                state.labels.mark_zero_lost(labels)
            parts.append(Component(labels.reshape([-1 if d == dim else 1 for d in range(rank)])))
    return Value(call.shape, tuple(parts))


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def like(state: PropagationState, call: OperatorCall) -> Value:
    """A constant with the labels of the tensor whose shape it takes."""
    value: Value = call["self"]
    if call.operator != "zeros_like":
        for part in value.components:
            state.labels.mark_zero_lost(part.labels)
    return Value(call.shape, tuple(Component(part.labels) for part in value.components))


@rule("rand_like", "randn_like", "randint_like", "bernoulli")
def random_like(state: PropagationState, call: OperatorCall) -> Value:
    """Random numbers. A smaller model would draw other numbers, so the units are fixed."""
    for value in call.values:
        state.fix(value, "a random number is drawn for each of them")
    return Value(call.shape)


@rule("arange", "scalar_tensor", "rand", "randn", "randint", "randperm", "linspace", "eye",
      "multinomial", "one_hot", "nonzero", "triu", "tril")  # fmt: skip
def fixed_size(state: PropagationState, call: OperatorCall) -> Value:
    """Tensors whose values depend on their sizes."""
    for value in call.values:
        state.fix(value, "this operator depends on how many there are")
    return Value(call.shape, why_rigid=CONSTANT)
