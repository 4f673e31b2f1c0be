"""Operators that put tensors beside one another."""

import torch

from hardconcrete.graph.operators.contraction import EMBEDDED, note
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value


@rule("cat", "concat", "concatenate")
def cat(scope: Scope, call: Call) -> Value:
    """Labels are joined along the dimension and united elsewhere."""
    return _joined(scope, call, call["dim"] % len(call.shape))


@rule("hstack")
def hstack(scope: Scope, call: Call) -> Value:
    """Columns beside columns, or vectors one after the other."""
    return _joined(scope, call, min(1, len(call.shape) - 1))


def _joined(scope: Scope, call: Call, dim: int) -> Value:
    values: list[Value] = [value for value in call.values if value.shape != (0,)]
    joined = _along(scope, values, dim)
    others = []
    for value in values:
        apart = [part for part in value.components if dim not in part.dims]
        sizes = [1 if d == dim else size for d, size in enumerate(value.shape)]
        others.append(Value(tuple(sizes), tuple(apart)))
    shape = [1 if d == dim else size for d, size in enumerate(call.shape)]
    parts = [*joined, *scope.merged(others, shape)]
    weight = all(value.weight for value in values)
    found = Value(call.shape, tuple(Component(part.labels) for part in parts), weight)
    return scope.settled(found)


def _along(scope: Scope, values: list[Value], dim: int) -> list[Component]:
    """One component over the joined dimension; a piece without one is fixed."""
    if not any(value.along(dim) for value in values):
        return []
    pieces = []
    for value in values:
        own = value.along(dim)
        labels = own[0].labels if own else None
        for other in own[1:]:
            scope.labels.unite(own[0].labels, other.labels)
        if labels is None:
            labels = scope.labels.fresh(value.shape[dim])
            labels = labels.reshape([-1 if d == dim else 1 for d in range(len(value.shape))])
            scope.labels.fix(labels, scope.reason("it is joined with units that cannot be removed"))
        pieces.append(labels)
    rank = len(values[0].shape)
    full = [max(piece.shape[d] for piece in pieces) for d in range(rank)]
    wide = [
        piece.expand([piece.shape[d] if d == dim else full[d] for d in range(rank)])
        for piece in pieces
    ]
    return [Component(torch.cat(wide, dim))]


@rule("stack")
def stack(scope: Scope, call: Call) -> Value:
    """A new dimension, along which nothing can be removed: the rest is united."""
    values = call.values
    rank = len(call.shape)
    dim = call["dim"] % rank
    dims = [d for d in range(rank) if d != dim]
    placed = [value.placed(dims, rank) for value in values]
    shape = [1 if d == dim else size for d, size in enumerate(call.shape)]
    parts = [Component(part.labels) for part in scope.merged(placed, shape)]
    return Value(call.shape, tuple(parts), all(value.weight for value in values))


@rule("embedding", "embedding_bag")
def embedding(scope: Scope, call: Call) -> Value:
    """Rows chosen by data are fixed; the width is made here."""
    weight: Value = call["weight"]
    weight = scope.rigid(weight, [0], "the data choose among them")
    rank = len(call.shape)
    made = [part for part in weight.along(1) if part.axis]
    note(scope, EMBEDDED, 0, weight.along(1), [], made)
    placed = Value((weight.shape[1],), tuple(
        Component(part.labels.reshape(-1)) for part in weight.along(1)
    )).placed([rank - 1], rank)  # fmt: skip
    return Value(call.shape, placed.components)


@rule("glu")
def glu(scope: Scope, call: Call) -> Value:
    """The first half times the sigmoid of the second."""
    value: Value = call["self"]
    dim = call["dim"] % len(value.shape)
    half = value.shape[dim] // 2
    parts = []
    for part in value.components:
        if dim in part.dims:
            first, second = part.labels.split(half, dim)
            scope.labels.unite(first, second)
            part = Component(first)
        parts.append(Component(part.labels))
    return scope.settled(Value(call.shape, tuple(parts)))
