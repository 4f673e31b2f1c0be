"""Fused attention, whose heads are units, and recurrent layers, whose units are fixed."""

from dataclasses import replace
from math import prod
from string import ascii_lowercase

from hardconcrete.graph.operators.contraction import contract, record_contraction
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value


@rule("scaled_dot_product_attention")
def attention(state: PropagationState, call: OperatorCall) -> Value:
    """A softmax of query times key, times value. The heads are units.

    With ``enable_gqa`` several query heads have one head of key and value.
    """
    query, key, value = call["query"], call["key"], call["value"]
    if call.get("enable_gqa"):
        key, value = (_repeated_heads(each, query.shape[-3]) for each in (key, value))
    batch = ascii_lowercase[: len(call.shape) - 2]

    def letters(each: Value, last: str) -> tuple[Value, str]:
        return each, batch[len(batch) - len(each.shape) + 2 :] + last

    scores = contract(state, [letters(query, "XZ"), letters(key, "YZ")], f"{batch}XY")
    if isinstance(call["attn_mask"], Value):
        mask = call["attn_mask"].with_rank(len(scores.shape))
        parts = state.merged([scores, mask], scores.shape)
        scores = scores.with_components([Component(part.labels) for part in parts])
    scores = state.keep_whole(scores, [-1], "softmax reads all of them")
    return contract(state, [letters(scores, "XY"), letters(value, "YZ")], f"{batch}XZ")


def _repeated_heads(each: Value, heads: int) -> Value:
    """Key or value with one head for each query head, or with one for all."""
    if each.shape[-3] == 1:
        return each
    dim, times = len(each.shape) - 3, heads // each.shape[-3]
    parts = [
        replace(part, labels=part.labels.repeat_interleave(times, dim))
        if dim in part.dims
        else part
        for part in each.components
    ]
    shape = [heads if d == dim else size for d, size in enumerate(each.shape)]
    return replace(each, shape=tuple(shape), components=tuple(parts))


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
def recurrent(state: PropagationState, call: OperatorCall) -> list[Value] | Value:
    """Fix all units of a recurrent layer. Its outputs are free."""
    for value in call.values:
        state.fix(value, "a recurrent layer keeps its sizes")
    weights = [value for value in call.values if value.from_parameters and len(value.shape) > 1]
    steps = prod(call.values[0].shape[:-1])
    record_contraction(
        state,
        "neuron",
        steps * sum(prod(weight.shape) for weight in weights),
        [],
        [],
        [part for value in weights for part in value.components_along(0)],
    )
    results = [Value(shape) for shape in call.shapes]
    return results if len(results) > 1 else results[0]
