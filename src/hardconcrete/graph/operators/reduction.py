"""Operators that read a whole dimension, which then cannot shrink."""

from collections.abc import Sequence

from hardconcrete.graph.operators.pointwise import pointwise
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

KEEP_DIM = (
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
    "cummax", "cummin", "sort", "argsort", "softmin",
)  # fmt: skip
REDUCE_DIM = (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "norm", "linalg_vector_norm",
    "logsumexp", "any", "all", "argmax", "argmin", "median", "nansum", "count_nonzero", "var_mean",
    "aminmax", "topk", "kthvalue", "std_mean", "mode",
)  # fmt: skip


@rule(*KEEP_DIM)
def over_dim(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """An operator that reads a dimension and keeps it, such as softmax."""
    whole = state.keep_whole(
        call["self"], [call.get("dim", -1)], f"{call.operator} reads all of them"
    )
    for part in whole.components:
        state.labels.mark_zero_lost(part.labels)
    return _results(call, Value(call.shape, _without_axes(whole)))


@rule(*REDUCE_DIM)
def reduction(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """An operator that removes the dimensions it reads, or changes their sizes."""
    if len(call.values) > 1:  # max and min of two tensors are pointwise
        return pointwise(state, call)
    value: Value = call.values[0]
    dims = _dims(call, value)
    whole = state.keep_whole(value, sorted(dims), f"{call.operator} reads all of them")
    parts = []
    for part in whole.components:
        state.labels.mark_zero_lost(part.labels)
        keepdim = len(call.shape) == len(value.shape)
        sizes = [size for dim, size in enumerate(part.labels.shape) if keepdim or dim not in dims]
        parts.append(Component(part.labels.reshape(sizes)))
    return _results(call, Value(call.shape, tuple(parts), value.from_parameters))


@rule("cosine_similarity")
def similarity(state: PropagationState, call: OperatorCall) -> Value:
    """A dot product along one dimension, divided by the two norms."""
    rank = len(call.shape) + 1
    dim, text = call["dim"] % rank, "cosine_similarity reads all of them"
    values = [state.keep_whole(value.with_rank(rank), [dim], text) for value in call.values]
    parts = state.merged(values, [*call.shape[:dim], 1, *call.shape[dim:]])
    for part in parts:
        state.labels.mark_zero_lost(part.labels)
    return Value(call.shape, tuple(Component(part.labels.squeeze(dim)) for part in parts))


def _dims(call: OperatorCall, value: Value) -> set[int]:
    """The dimensions that an operator reads: all of them, unless its argument says otherwise."""
    dims = call.get("dim")
    rank = len(value.shape)
    if dims is None or dims == []:
        has_default = (
            call.operator in ("topk", "kthvalue", "median", "mode") and "dim" in call.arguments
        )
        return {rank - 1} if has_default and rank else set(range(rank))
    several: Sequence[int] = [dims] if isinstance(dims, int) else dims
    return {dim % rank for dim in several} if rank else set()


def _without_axes(value: Value) -> tuple[Component, ...]:
    return tuple(Component(part.labels) for part in value.components)


def _results(call: OperatorCall, value: Value) -> Value | list[Value]:
    return [value] * len(call.shapes) if len(call.shapes) > 1 else value
