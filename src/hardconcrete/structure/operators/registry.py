"""Where rules are kept, by the name of their ATen operator without its overload."""

from collections.abc import Callable

from hardconcrete.structure.axes import Value
from hardconcrete.structure.scope import Call, Scope

Rule = Callable[[Scope, Call], Value | list[Value]]

RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operators."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = function
        return function

    return register
