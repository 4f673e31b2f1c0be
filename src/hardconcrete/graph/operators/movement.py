"""Operators that only move data: run them on the labels themselves."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hardconcrete.graph.operators.contraction import EMBEDDED, note
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Component, Value

WHOLE = "an index or slice leaves one unit without its neighbours"


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute",
    "transpose", "t", "numpy_T", "movedim", "swapaxes", "expand", "expand_as", "slice", "select",
    "narrow", "flip", "fliplr", "flipud", "rot90", "repeat", "tile", "pixel_unshuffle", "diagonal",
    "view_as", "reshape_as", "mT", "mH", "broadcast_to", "ravel", "adjoint", "swapdims", "moveaxis",
)  # fmt: skip
def movement(scope: Scope, call: Call) -> Value:
    """The labels go where the data goes."""
    if "dtype" in call.arguments:  # a view of the same bits as other numbers
        scope.fix(call["self"], "its bits are read as another type")
        return Value(call.shape)
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


@rule("pixel_shuffle")
def pixel_shuffle(scope: Scope, call: Call) -> Value:
    """All channels that become the pixels of one are one: a picture has no missing pixels."""
    (result,) = moved(scope, call)
    return scope.rigid(result, [-2, -1], "they become the pixels of one channel")


@rule("repeat_interleave")
def repeat_interleave(scope: Scope, call: Call) -> Value | list[Value]:
    """As many copies of each; a tensor that has a number for each speaks of all of them."""
    if not isinstance(call["repeats"], Value):
        return movement(scope, call)
    for value in call.values:
        scope.fix(value, "each is repeated as often as a tensor says")
    return Value(call.shape)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(scope: Scope, call: Call) -> Value | list[Value]:
    """Groups that are interleaved stay alike: the k-th channel of every group is one unit."""
    value: Value = call["self"]
    for part in value.along(1):
        by_group = part.labels.unflatten(1, (call["groups"], -1))
        scope.labels.unite(by_group, by_group[:, :1])
    return movement(scope, call)


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
    """x[:, index]: the indices' own dimensions take the place of those that they choose from.

    They come first where chosen dimensions are not neighbours. Masks have fewer dimensions than
    they choose from, and are not followed.
    """
    value: Value = call["self"]
    taken = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    extra = max(len(call["indices"][dim].shape) for dim in taken)
    if len(call.shape) != len(value.shape) - len(taken) + extra:
        scope.fix(value, text)
        return Value(call.shape)
    rigid = scope.rigid(value, taken, text)
    together = taken == list(range(taken[0], taken[-1] + 1))
    before = taken[0] if together else 0
    parts = []
    for part in rigid.components:
        sizes = [size for dim, size in enumerate(part.labels.shape) if dim not in taken]
        labels = part.labels.reshape(*sizes[:before], *[1] * extra, *sizes[before:])
        parts.append(replace(part, labels=labels))
    by_data = any(not call["indices"][dim].weight for dim in taken)
    if value.weight and by_data:  # an embedding in other words
        note(scope, EMBEDDED, 0, parts, [], [part for part in parts if part.axis])
    return Value(call.shape, tuple(parts), value.weight and not by_data)
