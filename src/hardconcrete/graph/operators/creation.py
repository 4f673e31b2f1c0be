"""Tensors made of nothing: constants, whose indices are as free as those of a parameter."""

from math import prod

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value


@rule("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "empty", "new_empty")
def constant(scope: Scope, call: Call) -> Value:
    """Fresh labels along every dimension: it can be made smaller."""
    if not call.shape or prod(call.shape) <= 1:
        return Value(call.shape, (), True)
    parts = []
    rank = len(call.shape)
    for dim, size in enumerate(call.shape):
        if size > 1 and dim > 0:
            labels = scope.labels.fresh(size)
            if call.operator not in ("zeros", "new_zeros"):
                scope.labels.disturb(labels)
            parts.append(Component(labels.reshape([-1 if d == dim else 1 for d in range(rank)])))
    return Value(call.shape, tuple(parts))


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def like(scope: Scope, call: Call) -> Value:
    """As large as its model, and shrinking with it."""
    value: Value = call["self"]
    if call.operator != "zeros_like":
        for part in value.components:
            scope.labels.disturb(part.labels)
    return Value(call.shape, tuple(Component(part.labels) for part in value.components))


@rule("rand_like", "randn_like", "randint_like", "bernoulli")
def drawn(scope: Scope, call: Call) -> Value:
    """Fewer random numbers are other ones: the small model would not compute the same."""
    for value in call.values:
        scope.fix(value, "a random number is drawn for each of them")
    return Value(call.shape)


@rule("arange", "scalar_tensor", "rand", "randn", "randint", "randperm", "linspace", "eye",
      "multinomial", "one_hot", "nonzero", "triu", "tril")  # fmt: skip
def rigid(scope: Scope, call: Call) -> Value:
    """Tensors whose sizes mean something."""
    for value in call.values:
        scope.fix(value, "this operator needs their number")
    return Value(call.shape)
