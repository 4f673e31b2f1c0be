"""The registry of rules, by the name of their ATen operator without its overload."""

from collections.abc import Callable

from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Value

Rule = Callable[[PropagationState, OperatorCall], Value | list[Value]]

RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operators."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = function
        return function

    return register
