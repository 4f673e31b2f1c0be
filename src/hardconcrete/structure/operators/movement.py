"""Operators that only move data: run them on the labels themselves."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hardconcrete.structure.axes import Component, Value
from hardconcrete.structure.operators.registry import rule
from hardconcrete.structure.scope import Call, Scope

WHOLE = "an index or slice leaves one unit without its neighbours"


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute",
    "transpose", "t", "numpy_T", "movedim", "swapaxes", "expand", "expand_as", "slice", "select",
    "narrow", "flip", "repeat", "repeat_interleave", "tile", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "diagonal", "view_as", "reshape_as", "mT", "mH", "broadcast_to", "ravel",
    "adjoint",
)  # fmt: skip
def movement(scope: Scope, call: Call) -> Value:
    """The labels go where the data goes."""
    (result,) = moved(scope, call)
    return result


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split",
      "unsafe_chunk")  # fmt: skip
def movements(scope: Scope, call: Call) -> list[Value]:
    """The same with several results."""
    return moved(scope, call)


def moved(scope: Scope, call: Call) -> list[Value]:
    """Every component after the same movement."""
    value: Value = call["self"]
    found: list[list[Component]] = [[] for _ in call.shapes]
    for part in value.components:
        results = _run(call, part.labels.expand(value.shape))
        for known, labels in zip(found, results, strict=True):
            known.append(replace(part, labels=labels))
    return [
        scope.settled(Value(shape, tuple(parts), value.weight, value.why), WHOLE)
        for shape, parts in zip(call.shapes, found, strict=True)
    ]


def _run(call: Call, labels: Tensor) -> list[Tensor]:
    arguments: dict[str, Any] = {
        name: torch.empty(argument.shape, device="meta")
        if isinstance(argument, Value)
        else argument
        for name, argument in call.arguments.items()
    }
    arguments["self"] = labels.contiguous()
    result = call.target(**arguments)
    return [result] if isinstance(result, Tensor) else list(result)


@rule("roll")
def roll(scope: Scope, call: Call) -> Value:
    """A roll does not commute with removal: what moves past the end depends on what is left."""
    value: Value = call["self"]
    dims = call["dims"] or range(len(value.shape))
    return scope.rigid(value, dims, "rolled indices depend on how many there are")


@rule("index_select", "gather", "index", "take_along_dim", "index_put", "scatter", "scatter_add",
      "index_add", "index_copy", "masked_scatter", "select_scatter", "slice_scatter")  # fmt: skip
def indexed(scope: Scope, call: Call) -> Value:
    """Dimensions that are indexed by numbers keep theirs; others are carried where it is clear."""
    value: Value = call["self"]
    text = "it is indexed by numbers that are fixed"
    if call.operator == "index_select":
        dim = call["dim"] % len(value.shape)
        rigid = scope.rigid(value, [dim], text)
        return Value(call.shape, rigid.components, value.weight)
    if call.operator == "index":
        return _advanced(scope, call, text)
    for other in call.values:
        scope.fix(other, text)
    return Value(call.shape)


def _advanced(scope: Scope, call: Call, text: str) -> Value:
    """x[:, index]: one index tensor keeps all other dimensions in their places."""
    value: Value = call["self"]
    taken = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    rigid = scope.rigid(value, taken, text)
    index = call["indices"][taken[0]]
    if len(taken) > 1 or not isinstance(index, Value):
        scope.fix(rigid, text)
        return Value(call.shape)
    before, extra = taken[0], len(index.shape)
    parts = []
    for part in rigid.components:
        sizes = part.labels.shape
        labels = part.labels.reshape(*sizes[:before], *[1] * extra, *sizes[before + 1 :])
        parts.append(replace(part, labels=labels))
    return Value(call.shape, tuple(parts), value.weight)
