"""Dense layers, matrix products and einsum, each written as an einsum."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from string import ascii_letters, ascii_lowercase, ascii_uppercase

from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import ContractionRecord, OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value

Operand = tuple[Value, str]
"""A tensor and its letters in the einsum."""

EMBEDDING_KIND = "embedding dimension"
EXPERT_KIND = "expert"
EXPERTS = "the data choose among these experts, also one whose gate is closed"
ATTENTION = "activations are multiplied with activations, and the sum is over all of them"


def contract(
    state: PropagationState, operands: Sequence[Operand], output: str, kind: str = "neuron"
) -> Value:
    """Propagate labels through an einsum.

    An einsum is an elementwise product in the space of all letters, and then a sum over the
    letters that are not in the output. Units along a summed letter can be removed if a parameter
    has that letter: the gate sits on that parameter. In a product of activations the summed letters
    stay whole. Of heads and head dimensions this leaves the heads.
    """
    if not all(value.from_parameters or value.chosen for value, _ in operands):
        operands = [
            (replace(v, from_parameters=v.from_parameters or v.chosen), s) for v, s in operands
        ]
    letters = "".join(dict.fromkeys("".join(subscripts for _, subscripts in operands)))
    aligned = [
        value.at_dims([letters.index(letter) for letter in subscripts], len(letters))
        for value, subscripts in operands
    ]
    sizes = [max(value.shape[dim] for value in aligned) for dim in range(len(letters))]
    summed = {dim for dim, letter in enumerate(letters) if letter not in output}
    activations = [k for k, value in enumerate(aligned) if not value.from_parameters]
    heads: list[Component] = []
    if len(activations) > 1:
        heads = [
            part
            for k in activations
            for part in aligned[k].components
            if summed & set(part.dims) and set(part.dims) - summed
        ]
        for k in activations:
            _fix_within_rigid(state, aligned[k], aligned[:k] + aligned[k + 1 :], summed)
        aligned = [state.keep_whole(value, sorted(summed), ATTENTION) for value in aligned]
    merged = state.merged(aligned, sizes, at_once=True)
    order = [letters.index(letter) for letter in output]
    result = [
        replace(
            _result_component(aligned, part),
            labels=part.labels.permute([*order, *sorted(summed)]).reshape(
                [part.labels.shape[dim] for dim in order]
            ),
        )
        for part in merged
        if not summed & set(part.dims)
    ]
    reads = [part for each in merged for part in _reading_parameter(state, aligned, each, summed)]
    makes = [part for part in _parameter_components(aligned) if not summed & set(part.dims)]
    from_parameters = all(value.from_parameters for value in aligned)
    summed_alone = {
        dim for dim in summed if sum(letters[dim] in subscripts for _, subscripts in operands) == 1
    }
    macs = 0  # of an outer product
    if summed:
        macs = prod(size for dim, size in enumerate(sizes) if dim not in summed_alone)
        multiplied = [aligned[k] for k in activations]
        heads += [part for part in merged if _operands_along(multiplied, part) > 1]
    parts = [*merged, *_fixed_along_parameters(aligned, merged)]
    record_contraction(state, kind, macs, parts, reads, [] if from_parameters else makes, heads)
    return Value(tuple(sizes[dim] for dim in order), tuple(result), from_parameters)


def _fixed_along_parameters(
    aligned: Sequence[Value], merged: Sequence[Component]
) -> list[Component]:
    """The dimensions of parameters whose labels all became one, which cannot shrink."""
    known = {dim for part in merged for dim in part.dims}
    return [part for part in _parameter_components(aligned) if not known & set(part.dims)]


def _fix_within_rigid(
    state: PropagationState, value: Value, others: Sequence[Value], summed: set[int]
) -> None:
    """Fix the units of an activation that were split over a dimension that cannot shrink.

    Where the heads stay, all heads would have to lose the same features.
    """
    for part in state.simplified(value).components:
        for dim in sorted(set(part.dims) - summed) if len(part.dims) > 1 else ():
            rigid = [
                each for each in others if each.shape[dim] > 1 and not each.components_along(dim)
            ]
            if rigid:
                state.labels.fix(part.labels, state.combined_with(rigid[0]))


def record_contraction(
    state: PropagationState,
    kind: str,
    macs: int,
    parts: Sequence[Component],
    reads: Sequence[Component],
    makes: Sequence[Component],
    heads: Sequence[Component] = (),
) -> None:
    """Record which units the current operator reads and makes, and its multiply-adds."""
    state.contractions.append(
        ContractionRecord(
            state.call.module if state.call else "",
            kind,
            macs,
            tuple(part.labels for part in parts),
            tuple(part.labels for part in heads),
            tuple((part.axis, part.labels) for part in reads if part.axis),
            tuple((part.axis, part.labels) for part in makes if part.axis),
        )
    )


def _operands_along(operands: Sequence[Value], part: Component) -> int:
    """How many operands have labels along a dimension of a component."""
    return sum(any(set(own.dims) & set(part.dims) for own in each.components) for each in operands)


def _reading_parameter(
    state: PropagationState, aligned: Sequence[Value], part: Component, summed: set[int]
) -> list[Component]:
    """The parameter that reads the units along a summed letter; fix them if there is none."""
    dims = summed & set(part.dims)
    if not dims:
        return []
    readers = [
        p for p in _parameter_components(aligned) if dims & set(p.dims) and p.zero_with_parameter
    ]
    if not readers:
        state.labels.fix(part.labels, state.reason("no parameter reads it, only other tensors"))
    return readers[-1:]


def _result_component(aligned: Sequence[Value], part: Component) -> Component:
    """A component of the result, with a parameter axis if only one parameter varies along it."""
    sources = [p for p in _parameter_components(aligned) if set(p.dims) & set(part.dims)]
    single = all(value.from_parameters for value in aligned) and len({p.axis for p in sources}) == 1
    return replace(sources[0], labels=part.labels) if single else Component(part.labels)


def _parameter_components(aligned: Sequence[Value]) -> list[Component]:
    """The components whose labels come from a parameter."""
    return [
        part
        for value in aligned
        if value.from_parameters
        for part in value.components
        if part.axis is not None
    ]


def with_bias(state: PropagationState, value: Value, bias: Value | None, dim: int = -1) -> Value:
    """Add a bias along a dimension."""
    if bias is None:
        return value
    rank = len(value.shape)
    return _sum_with(state, value, bias.at_dims([dim % rank], rank))


def _sum_with(state: PropagationState, product: Value, other: Value) -> Value:
    """A product plus another tensor, so it can be nonzero where a factor is zero."""
    parts = state.merged([product, other.with_rank(len(product.shape))], product.shape)
    nonzero = tuple(replace(part, zero_with_parameter=False) for part in parts)
    return Value(product.shape, nonzero, product.from_parameters and other.from_parameters)


@rule("linear")
def linear(state: PropagationState, call: OperatorCall) -> Value:
    """A product x W^T, plus a bias."""
    value, weight = call["input"], call["weight"]
    free = ascii_letters[: len(value.shape) - 1]
    output = f"{free}Y" if len(weight.shape) == 2 else free
    product = contract(
        state, [(value, f"{free}Z"), (weight, "YZ" if len(weight.shape) == 2 else "Z")], output
    )
    return with_bias(state, product, call["bias"])


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(state: PropagationState, call: OperatorCall) -> Value:
    """A product a @ b, of any ranks."""
    first, second = call.values
    return _matmul(state, first, second)


def _matmul(state: PropagationState, first: Value, second: Value) -> Value:
    left, right = len(first.shape), len(second.shape)
    batch = ascii_letters[: max(left, right, 2) - 2]
    a = "Z" if left == 1 else f"{batch[len(batch) - left + 2 :]}XZ"
    b = "Z" if right == 1 else f"{batch[len(batch) - right + 2 :]}ZY"
    output = batch + ("X" if left > 1 else "") + ("Y" if right > 1 else "")
    return contract(state, [(first, a), (second, b)], output)


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def grouped_matmul(state: PropagationState, call: OperatorCall) -> Value:
    """Each row times one of several matrices: those of the experts that data choose."""
    rows, matrices = call.values[:2]
    if len(rows.shape) != 2 or len(matrices.shape) != 3:
        raise NotImplementedError("rows and stacked matrices are known")
    whole = keep_experts(state, matrices)
    parts = [replace(part, labels=part.labels.select(0, 0)) for part in whole.components]
    chosen = replace(whole, shape=whole.shape[1:], components=tuple(parts))
    return contract(state, [(rows, "xz"), (chosen, "zy")], "xy")


def keep_experts(state: PropagationState, matrices: Value) -> Value:
    """Fix the experts along the first dimension of a parameter, and record that they are there."""
    experts = [part for part in matrices.components_along(0) if part.axis]
    whole = state.keep_whole(matrices, [0], EXPERTS)
    record_contraction(state, EXPERT_KIND, 0, [], [], experts)
    return whole


@rule("addmm", "baddbmm")
def addmm(state: PropagationState, call: OperatorCall) -> Value:
    """A product a @ b, added to a tensor."""
    added, first, second = call.values
    return _sum_with(state, _matmul(state, first, second), added)


@rule("tensordot")
def tensordot(state: PropagationState, call: OperatorCall) -> Value:
    """A sum over pairs of dimensions; the two of a pair share a letter."""
    first, second = call["self"], call["other"]
    left, right = (
        list(ascii_lowercase[: len(first.shape)]),
        list(ascii_uppercase[: len(second.shape)]),
    )
    for a, b in zip(call["dims_self"], call["dims_other"], strict=True):
        right[b] = left[a]
    output = "".join(letter for letter in left + right if (left + right).count(letter) == 1)
    return contract(state, [(first, "".join(left)), (second, "".join(right))], output)


@rule("einsum")
def einsum(state: PropagationState, call: OperatorCall) -> Value:
    """An einsum equation. Ellipses are replaced by letters."""
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    values, subscripts = call["tensors"], inputs.split(",")
    unused = [letter for letter in ascii_letters if letter not in inputs]
    extra = max(
        len(value.shape) - len(text.replace("...", ""))
        for value, text in zip(values, subscripts, strict=True)
    )
    ellipsis = "".join(unused[:extra])
    operands = []
    for value, text in zip(values, subscripts, strict=True):
        missing = len(value.shape) - len(text.replace("...", ""))
        operands.append((value, text.replace("...", ellipsis[extra - missing :])))
    if not arrow:
        once = sorted(letter for letter in set(inputs) if inputs.count(letter) == 1)
        output = "..." + "".join(letter for letter in once if letter.isalpha())
    output = output.replace("...", ellipsis)
    if any(len(set(text)) != len(text) for _, text in operands):
        for value in values:
            state.fix(value, "one operand of the equation has a letter twice")
        return Value(call.shape)
    return contract(state, operands, output)
