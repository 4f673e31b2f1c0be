"""Concatenation, stacking, embeddings and gated linear units."""

from dataclasses import replace

import torch

from hardconcrete.graph.operators.contraction import EMBEDDING_KIND, record_contraction
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value


@rule("cat", "concat", "concatenate")
def cat(state: PropagationState, call: OperatorCall) -> Value:
    """Concatenate the labels along the dimension, and unite them along the others."""
    return _concatenated(state, call, call["dim"] % len(call.shape))


@rule("hstack")
def hstack(state: PropagationState, call: OperatorCall) -> Value:
    """A cat along dimension 1, or 0 for vectors."""
    return _concatenated(state, call, min(1, len(call.shape) - 1))


def _concatenated(state: PropagationState, call: OperatorCall, dim: int) -> Value:
    values: list[Value] = [value for value in call.values if 0 not in value.shape]
    values = [_spread_along(value, values, dim) for value in values]
    along = _components_along(state, values, dim)
    others = []
    for value in values:
        across = [part for part in value.components if part.labels.shape[dim] == 1]
        sizes = [1 if d == dim else size for d, size in enumerate(value.shape)]
        others.append(Value(tuple(sizes), tuple(across)))
    shape = [1 if d == dim else size for d, size in enumerate(call.shape)]
    parts = [*along, *state.merged(others, shape)]
    from_parameters = all(value.from_parameters for value in values)
    return state.simplified(
        Value(call.shape, tuple(Component(part.labels) for part in parts), from_parameters)
    )


def _spread_along(value: Value, values: list[Value], dim: int) -> Value:
    """Repeat labels along a dimension where another tensor has labels along both dimensions.

    With partly rotary embeddings one tensor has labels of heads, and the other one of their
    features.
    """
    joint = {d for each in values for part in each.components_along(dim) for d in part.dims}
    if value.components_along(dim) or len(joint) < 2:
        return value
    size = [-1 if d != dim else value.shape[dim] for d in range(len(value.shape))]
    inside = [part for part in value.components if set(part.dims) <= joint]
    if len(inside) != 1:
        return value
    spread = replace(inside[0], labels=inside[0].labels.expand(size))
    return value.with_components([spread if part in inside else part for part in value.components])


def _components_along(state: PropagationState, values: list[Value], dim: int) -> list[Component]:
    """One component over the concatenated dimension. A tensor without labels there is fixed."""
    if not any(value.components_along(dim) for value in values):
        return []
    pieces = []
    for value in values:
        parts = value.components_along(dim)
        labels = parts[0].labels if parts else None
        for other in parts[1:]:
            state.labels.unite(parts[0].labels, other.labels)
        if labels is None:
            labels = state.labels.fresh(value.shape[dim])
            labels = labels.reshape([-1 if d == dim else 1 for d in range(len(value.shape))])
            state.labels.fix(
                labels, state.reason("it lies in a concatenated tensor that cannot shrink")
            )
        pieces.append(labels)
    rank = len(values[0].shape)
    full = [max(piece.shape[d] for piece in pieces) for d in range(rank)]
    wide = [
        piece.expand([piece.shape[d] if d == dim else full[d] for d in range(rank)])
        for piece in pieces
    ]
    return [Component(torch.cat(wide, dim))]


@rule("stack")
def stack(state: PropagationState, call: OperatorCall) -> Value:
    """Unite the labels of all tensors. Nothing can be removed along the new dimension."""
    values = call.values
    rank = len(call.shape)
    dim = call["dim"] % rank
    dims = [d for d in range(rank) if d != dim]
    placed = [value.at_dims(dims, rank) for value in values]
    shape = [1 if d == dim else size for d, size in enumerate(call.shape)]
    parts = [Component(part.labels) for part in state.merged(placed, shape)]
    return Value(call.shape, tuple(parts), all(value.from_parameters for value in values))


@rule("embedding", "embedding_bag")
def embedding(state: PropagationState, call: OperatorCall) -> Value:
    """Rows are fixed, since data index them. The embedding dimension is made here."""
    weight: Value = call["weight"]
    weight = state.keep_whole(weight, [0], "the data index them")
    rank = len(call.shape)
    made = [part for part in weight.components_along(1) if part.axis]
    record_contraction(state, EMBEDDING_KIND, 0, weight.components_along(1), [], made)
    placed = Value((weight.shape[1],), tuple(
        Component(part.labels.reshape(-1)) for part in weight.components_along(1)
    )).at_dims([rank - 1], rank)  # fmt: skip
    return Value(call.shape, placed.components)


@rule("glu")
def glu(state: PropagationState, call: OperatorCall) -> Value:
    """The first half times the sigmoid of the second: unite the halves."""
    value: Value = call["self"]
    dim = call["dim"] % len(value.shape)
    half = value.shape[dim] // 2
    parts = []
    for part in value.components:
        if dim in part.dims:
            first, second = part.labels.split(half, dim)
            state.labels.unite(first, second)
            part = Component(first)
        parts.append(Component(part.labels))
    return state.simplified(Value(call.shape, tuple(parts)))
