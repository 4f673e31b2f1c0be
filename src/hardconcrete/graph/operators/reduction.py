"""Operators that read a whole dimension: it may not shrink."""

from collections.abc import Sequence

from hardconcrete.graph.operators.pointwise import pointwise
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

ALONG = (
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
    "cummax", "cummin", "sort", "argsort", "softmin",
)  # fmt: skip
DOWN = (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "norm", "linalg_vector_norm",
    "logsumexp", "any", "all", "argmax", "argmin", "median", "nansum", "count_nonzero", "var_mean",
    "aminmax", "topk", "kthvalue", "std_mean", "mode",
)  # fmt: skip


@rule(*ALONG)
def along(scope: Scope, call: Call) -> Value | list[Value]:
    """The dimension stays, and stays whole."""
    rigid = scope.rigid(call["self"], [call.get("dim", -1)], f"{call.operator} reads all of them")
    for part in rigid.components:
        scope.labels.disturb(part.labels)
    return _results(call, Value(call.shape, _without_axes(rigid)))


@rule(*DOWN)
def down(scope: Scope, call: Call) -> Value | list[Value]:
    """The dimensions are read and go, or stay with other sizes."""
    if len(call.values) > 1:  # the pointwise forms of max and min
        return pointwise(scope, call)
    value: Value = call.values[0]
    dims = _dims(call, value)
    rigid = scope.rigid(value, sorted(dims), f"{call.operator} reads all of them")
    parts = []
    for part in rigid.components:
        scope.labels.disturb(part.labels)
        kept = len(call.shape) == len(value.shape)
        sizes = [size for dim, size in enumerate(part.labels.shape) if kept or dim not in dims]
        parts.append(Component(part.labels.reshape(sizes)))
    return _results(call, Value(call.shape, tuple(parts), value.weight))


@rule("cosine_similarity")
def similarity(scope: Scope, call: Call) -> Value:
    """A sum over one dimension of a product index by index, over two norms along it."""
    rank = len(call.shape) + 1
    dim, text = call["dim"] % rank, "cosine_similarity reads all of them"
    values = [scope.rigid(value.aligned(rank), [dim], text) for value in call.values]
    parts = scope.merged(values, [*call.shape[:dim], 1, *call.shape[dim:]])
    for part in parts:
        scope.labels.disturb(part.labels)
    return Value(call.shape, tuple(Component(part.labels.squeeze(dim)) for part in parts))


def _dims(call: Call, value: Value) -> set[int]:
    dims = call.get("dim")
    rank = len(value.shape)
    if dims is None or dims == []:
        has_default = (
            call.operator in ("topk", "kthvalue", "median", "mode") and "dim" in call.arguments
        )
        return {rank - 1} if has_default and rank else set(range(rank))
    chosen: Sequence[int] = [dims] if isinstance(dims, int) else dims
    return {dim % rank for dim in chosen} if rank else set()


def _without_axes(value: Value) -> tuple[Component, ...]:
    return tuple(Component(part.labels) for part in value.components)


def _results(call: Call, value: Value) -> Value | list[Value]:
    return [value] * len(call.shapes) if len(call.shapes) > 1 else value
