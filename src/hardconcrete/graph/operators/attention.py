"""Attention and recurrence as whole operators: their units are fixed, with the reason."""

from hardconcrete.graph.operators.contraction import note
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.scope import Call, Scope
from hardconcrete.graph.values import Value


@rule("scaled_dot_product_attention")
def attention(scope: Scope, call: Call) -> Value:
    """Heads and their dimensions."""
    for value in call.values:
        scope.fix(value, "attention heads are not gated yet")
    return Value(call.shape)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
def recurrent(scope: Scope, call: Call) -> list[Value] | Value:
    """The inside of a recurrent layer."""
    for value in call.values:
        scope.fix(value, "a recurrent layer keeps its sizes")
    weights = [value for value in call.values if value.weight and len(value.shape) > 1]
    note(scope, "neuron", 0, [], [], [part for value in weights for part in value.along(0)])
    results = [Value(shape) for shape in call.shapes]
    return results if len(results) > 1 else results[0]
