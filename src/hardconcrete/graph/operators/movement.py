"""Operators that only move data. Their rule runs the operator on the labels."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hardconcrete.graph.operators.contraction import (
    EMBEDDING_KIND,
    keep_experts,
    record_contraction,
)
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

RESHAPES = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "ravel",
)  # fmt: skip
"""Operators that keep the order of all entries."""

PER_DIMENSION = ("flip", "fliplr", "flipud", "repeat", "tile")
"""Operators that treat each dimension alike, whatever its size."""

SPLIT_UNIT = "an index or slice separates one unit from the others"


@rule(
    *RESHAPES, *PER_DIMENSION, "squeeze", "unsqueeze", "permute", "transpose", "t", "numpy_T",
    "movedim", "swapaxes", "slice", "select", "narrow", "rot90", "pixel_unshuffle", "diagonal",
    "mT", "mH", "adjoint", "swapdims", "moveaxis",
)  # fmt: skip
def movement(state: PropagationState, call: OperatorCall) -> Value:
    """An operator with one result."""
    if "dtype" in call.arguments:  # a view of the same bits as another dtype
        state.fix(call["self"], "its bits are read as another dtype")
        return Value(call.shape)
    (result,) = run_on_labels(state, call)
    return result


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split",
      "unsafe_chunk")  # fmt: skip
def movements(state: PropagationState, call: OperatorCall) -> list[Value]:
    """An operator with several results."""
    return run_on_labels(state, call)


def run_on_labels(state: PropagationState, call: OperatorCall) -> list[Value]:
    """Run the operator on the labels of each component."""
    value: Value = call["self"]
    components: list[list[Component]] = [[] for _ in call.shapes]
    for part in value.components:
        results = _moved(call, part.labels, value.shape)
        for known, labels in zip(components, results, strict=True):
            if labels.numel():
                known.append(replace(part, labels=_without_copies(labels)))
    return [
        state.simplified(
            Value(shape, tuple(parts), value.from_parameters, value.why_rigid, value.chosen),
            SPLIT_UNIT,
        )
        for shape, parts in zip(call.shapes, components, strict=True)
    ]


def _moved(call: OperatorCall, labels: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """The labels of each result. They are much smaller than the tensor, and stay so."""
    if call.operator in RESHAPES and 0 not in shape:
        return [_reshaped(labels, shape, call.shape)]
    of_a_dimension = call.operator == "repeat_interleave" and call["dim"] is not None
    if of_a_dimension or call.operator in PER_DIMENSION:
        return _call_on_labels(call, labels)
    return _call_on_labels(call, labels.expand(shape))


def _reshaped(labels: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Reshape labels, with size 1 where blocks of dimensions have equal labels.

    Example:
        >>> _reshaped(torch.arange(6).view(1, 2, 1, 3), [4, 2, 5, 3], [8, 5, 3]).shape
        torch.Size([8, 1, 3])
    """
    full, sizes = list(labels.shape), list(after)
    i = j = 0
    while i < len(before) or j < len(after):
        first, rows, columns = (i, j), prod(before[i : i + 1]), prod(after[j : j + 1])
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while rows != columns:  # until both sides of the block have as many entries
            if rows < columns:
                rows, i = rows * before[i], i + 1
            else:
                columns, j = columns * after[j], j + 1
        block = slice(first[0], i)
        if prod(labels.shape[block]) == 1:
            sizes[first[1] : j] = [1] * (j - first[1])
        else:
            full[block] = before[block]
    return labels.expand(full).reshape(sizes)


def _call_on_labels(call: OperatorCall, labels: Tensor) -> list[Tensor]:
    arguments: dict[str, Any] = {
        name: torch.empty(argument.shape, device="meta")
        if isinstance(argument, Value)
        else argument
        for name, argument in call.arguments.items()
    }
    try:
        result = call.target(**{**arguments, "self": labels})
    except RuntimeError:  # a view that these strides do not allow
        result = call.target(**{**arguments, "self": labels.contiguous()})
    return [result] if isinstance(result, Tensor) else list(result)


def _without_copies(labels: Tensor) -> Tensor:
    """One index of each dimension that was expanded: labels need not be as large as activations."""
    for dim, stride in enumerate(labels.stride()):
        labels = labels if stride else labels.narrow(dim, 0, min(1, labels.shape[dim]))
    return labels


@rule("expand", "expand_as", "broadcast_to")
def expand(state: PropagationState, call: OperatorCall) -> Value:
    """Repeat dimensions of size 1, as for masks and grouped queries: a copy can be removed."""
    (result,) = run_on_labels(state, call)
    value: Value = call["self"]
    rank = len(call.shape)
    before = value.with_rank(rank).shape
    copies = []
    for dim, size in enumerate(call.shape):
        if dim > 0 and before[dim] == 1 < size:
            labels = state.labels.fresh(size)
            state.labels.mark_zero_lost(labels)
            sizes = [-1 if d == dim else 1 for d in range(rank)]
            copies.append(Component(labels.reshape(sizes), copies=True))
    return replace(result, components=(*result.components, *copies))


@rule("pixel_shuffle")
def pixel_shuffle(state: PropagationState, call: OperatorCall) -> Value:
    """Unite the channels that become pixels of one channel."""
    (result,) = run_on_labels(state, call)
    return state.keep_whole(result, [-2, -1], "they become the pixels of one channel")


@rule("repeat_interleave")
def repeat_interleave(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """A fixed number of copies of each index. If a tensor holds the numbers, all are fixed."""
    if not isinstance(call["repeats"], Value):
        return movement(state, call)
    for value in call.values:
        state.fix(value, "a tensor holds the number of repeats of each")
    return Value(call.shape)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(state: PropagationState, call: OperatorCall) -> Value | list[Value]:
    """Unite the k-th channel of every group: all groups must keep the same number of channels."""
    value: Value = call["self"]
    for part in value.components_along(1):
        by_group = part.labels.unflatten(1, (call["groups"], -1))
        state.labels.unite(by_group, by_group[:, :1])
    return movement(state, call)


@rule("roll")
def roll(state: PropagationState, call: OperatorCall) -> Value:
    """Fix the rolled dimensions: where an index moves depends on how many there are."""
    value: Value = call["self"]
    dims = call["dims"] or range(len(value.shape))
    return state.keep_whole(value, dims, "where a roll moves them depends on how many there are")


@rule("index_select", "gather", "index", "take_along_dim", "index_put", "scatter", "scatter_add",
      "index_add", "index_copy", "masked_scatter", "select_scatter", "slice_scatter")  # fmt: skip
def indexed(state: PropagationState, call: OperatorCall) -> Value:
    """Fix the indexed dimensions. The others keep their labels for index_select and x[index]."""
    value: Value = call["self"]
    text = "it is indexed by numbers that are fixed"
    if call.operator == "index_select":
        dim = call["dim"] % len(value.shape)
        whole = state.keep_whole(value, [dim], text)
        return Value(call.shape, whole.components, value.from_parameters)
    if call.operator == "index":
        return _advanced_indexing(state, call, text)
    for other in call.values:
        state.fix(other, text)
    return Value(call.shape)


def _advanced_indexing(state: PropagationState, call: OperatorCall, text: str) -> Value:
    """x[:, index]: the dimensions of the index tensors replace the indexed dimensions.

    They come first if the indexed dimensions are not adjacent. Boolean masks index several
    dimensions at once; with a mask all units are fixed.
    """
    value: Value = call["self"]
    indexed_dims = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    extra = max(len(call["indices"][dim].shape) for dim in indexed_dims)
    if len(call.shape) != len(value.shape) - len(indexed_dims) + extra:
        state.fix(value, text)
        return Value(call.shape)
    by_data = any(not call["indices"][dim].from_parameters for dim in indexed_dims)
    of_experts = value.from_parameters and by_data and indexed_dims == [0] and len(value.shape) > 2
    if of_experts:
        whole = keep_experts(state, value)
    else:
        whole = state.keep_whole(value, indexed_dims, text)
    adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1))
    before = indexed_dims[0] if adjacent else 0
    parts = []
    for part in whole.components:
        sizes = [size for dim, size in enumerate(part.labels.shape) if dim not in indexed_dims]
        labels = part.labels.reshape(*sizes[:before], *[1] * extra, *sizes[before:])
        parts.append(replace(part, labels=labels))
    if of_experts:
        return Value(call.shape, tuple(parts), chosen=True)
    if value.from_parameters and by_data:  # an embedding written as an index
        record_contraction(
            state, EMBEDDING_KIND, 0, parts, [], [part for part in parts if part.axis]
        )
    from_parameters = value.from_parameters and not by_data
    return Value(call.shape, tuple(parts), from_parameters, whole.why_rigid)
