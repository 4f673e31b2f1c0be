"""Fused attention and recurrent layers: their units are fixed."""

from hardconcrete.graph.operators.contraction import record_contraction
from hardconcrete.graph.operators.registry import rule
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Value


@rule("scaled_dot_product_attention")
def attention(state: PropagationState, call: OperatorCall) -> Value:
    """Fix heads and head dimensions."""
    for value in call.values:
        state.fix(value, "attention heads are not gated yet")
    return Value(call.shape)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
def recurrent(state: PropagationState, call: OperatorCall) -> list[Value] | Value:
    """Fix all units of a recurrent layer. Its outputs are free."""
    for value in call.values:
        state.fix(value, "a recurrent layer keeps its sizes")
    weights = [value for value in call.values if value.from_parameters and len(value.shape) > 1]
    record_contraction(
        state,
        "neuron",
        0,
        [],
        [],
        [part for value in weights for part in value.components_along(0)],
    )
    results = [Value(shape) for shape in call.shapes]
    return results if len(results) > 1 else results[0]
