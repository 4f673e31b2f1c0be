"""Sums over units: dense layers, matrix products and einsum, all as letters of one equation."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from string import ascii_letters, ascii_lowercase, ascii_uppercase

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Contraction, Scope
from hardconcrete.graph.values import Component, Value

Operand = tuple[Value, str]
EMBEDDED = "embedding dimension"
ATTENTION = "activations are multiplied with activations, as in attention"


def contract(scope: Scope, operands: Sequence[Operand], output: str, kind: str = "neuron") -> Value:
    """What an einsum does to labels.

    In the space of all letters it is a product index by index, then a sum over the letters that
    are not in the output. Units along a summed letter can go if a parameter carries it: there the
    gate sits.
    """
    letters = "".join(dict.fromkeys("".join(subscripts for _, subscripts in operands)))
    placed = [
        value.placed([letters.index(letter) for letter in subscripts], len(letters))
        for value, subscripts in operands
    ]
    sizes = [max(value.shape[dim] for value in placed) for dim in range(len(letters))]
    if sum(not value.weight for value in placed) > 1:
        for value in placed:
            scope.fix(value, ATTENTION)
    merged = scope.merged(placed, sizes)
    summed = {dim for dim, letter in enumerate(letters) if letter not in output}
    order = [letters.index(letter) for letter in output]
    result = [
        replace(
            _image(placed, part),
            labels=part.labels.permute([*order, *sorted(summed)]).reshape(
                [part.labels.shape[dim] for dim in order]
            ),
        )
        for part in merged
        if not summed & set(part.dims)
    ]
    reads = [part for each in merged for part in _reader(scope, placed, each, summed)]
    makes = [part for part in _from_parameters(placed) if not summed & set(part.dims)]
    weight = all(value.weight for value in placed)
    summed_before = {
        dim for dim in summed if sum(letters[dim] in subscripts for _, subscripts in operands) == 1
    }
    macs = prod(size for dim, size in enumerate(sizes) if dim not in summed_before)
    note(scope, kind, macs, merged, reads, [] if weight else makes)
    return Value(tuple(sizes[dim] for dim in order), tuple(result), weight)


def note(
    scope: Scope,
    kind: str,
    macs: int,
    parts: Sequence[Component],
    reads: Sequence[Component],
    makes: Sequence[Component],
) -> None:
    """Write down who reads whom, and what it costs."""
    scope.contractions.append(
        Contraction(
            scope.call.module if scope.call else "",
            kind,
            macs,
            tuple(part.labels for part in parts),
            tuple((part.axis, part.labels) for part in reads if part.axis),
            tuple((part.axis, part.labels) for part in makes if part.axis),
        )
    )


def _reader(
    scope: Scope, placed: Sequence[Value], part: Component, summed: set[int]
) -> list[Component]:
    """The parameter that reads the units along a summed letter."""
    dims = summed & set(part.dims)
    if not dims:
        return []
    readers = [p for p in _from_parameters(placed) if dims & set(p.dims) and p.faithful]
    if not readers:
        scope.labels.fix(part.labels, scope.reason("no parameter reads it, only other tensors"))
    return readers[-1:]


def _image(placed: Sequence[Value], part: Component) -> Component:
    """A product of parameters is zero where one is; one with an activation stands for none."""
    own = [p for p in _from_parameters(placed) if set(p.dims) & set(part.dims)]
    alone = all(value.weight for value in placed) and len({p.axis for p in own}) == 1
    return replace(own[0], labels=part.labels) if alone else Component(part.labels)


def _from_parameters(placed: Sequence[Value]) -> list[Component]:
    """The components that are images of parameters."""
    return [
        part
        for value in placed
        if value.weight
        for part in value.components
        if part.axis is not None
    ]


def with_bias(scope: Scope, value: Value, bias: Value | None, dim: int = -1) -> Value:
    """A bias at a dimension is added."""
    if bias is None:
        return value
    rank = len(value.shape)
    return _added(scope, value, bias.placed([dim % rank], rank))


def _added(scope: Scope, product: Value, other: Value) -> Value:
    """A product with something added: it is not zero where its factors are."""
    parts = scope.merged([product, other.aligned(len(product.shape))], product.shape)
    unfaithful = tuple(replace(part, faithful=False) for part in parts)
    return Value(product.shape, unfaithful, product.weight and other.weight)


@rule("linear")
def linear(scope: Scope, call: Call) -> Value:
    """Y = x W^T + b."""
    value, weight = call["input"], call["weight"]
    free = ascii_letters[: len(value.shape) - 1]
    output = f"{free}Y" if len(weight.shape) == 2 else free
    product = contract(
        scope, [(value, f"{free}Z"), (weight, "YZ" if len(weight.shape) == 2 else "Z")], output
    )
    return with_bias(scope, product, call["bias"])


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(scope: Scope, call: Call) -> Value:
    """A @ b, of any ranks."""
    first, second = call.values
    return _matmul(scope, first, second)


def _matmul(scope: Scope, first: Value, second: Value) -> Value:
    left, right = len(first.shape), len(second.shape)
    batch = ascii_letters[: max(left, right, 2) - 2]
    a = "Z" if left == 1 else f"{batch[len(batch) - left + 2 :]}XZ"
    b = "Z" if right == 1 else f"{batch[len(batch) - right + 2 :]}ZY"
    output = batch + ("X" if left > 1 else "") + ("Y" if right > 1 else "")
    return contract(scope, [(first, a), (second, b)], output)


@rule("addmm", "baddbmm")
def addmm(scope: Scope, call: Call) -> Value:
    """Self + a @ b."""
    added, first, second = call.values
    return _added(scope, _matmul(scope, first, second), added)


@rule("tensordot")
def tensordot(scope: Scope, call: Call) -> Value:
    """A sum over pairs of dimensions, which share a letter."""
    first, second = call["self"], call["other"]
    left, right = (
        list(ascii_lowercase[: len(first.shape)]),
        list(ascii_uppercase[: len(second.shape)]),
    )
    for a, b in zip(call["dims_self"], call["dims_other"], strict=True):
        right[b] = left[a]
    output = "".join(letter for letter in left + right if (left + right).count(letter) == 1)
    return contract(scope, [(first, "".join(left)), (second, "".join(right))], output)


@rule("einsum")
def einsum(scope: Scope, call: Call) -> Value:
    """An equation with letters; ellipses become letters."""
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    values, subscripts = call["tensors"], inputs.split(",")
    unused = [letter for letter in ascii_letters if letter not in inputs]
    extra = max(
        len(value.shape) - len(text.replace("...", ""))
        for value, text in zip(values, subscripts, strict=True)
    )
    dots = "".join(unused[:extra])
    operands = []
    for value, text in zip(values, subscripts, strict=True):
        missing = len(value.shape) - len(text.replace("...", ""))
        operands.append((value, text.replace("...", dots[extra - missing :])))
    if not arrow:
        once = sorted(letter for letter in set(inputs) if inputs.count(letter) == 1)
        output = "..." + "".join(letter for letter in once if letter.isalpha())
    output = output.replace("...", dots)
    if any(len(set(text)) != len(text) for _, text in operands):
        for value in values:
            scope.fix(value, "a letter of the equation stands twice in one operand")
        return Value(call.shape)
    return contract(scope, operands, output)
