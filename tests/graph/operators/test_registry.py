from hardconcrete.graph.operators.pointwise import KEEPS_ZERO, LINEAR
from hardconcrete.graph.operators.registry import RULES, rule


def test_one_rule_may_have_several_operators() -> None:
    try:

        @rule("first_name", "second_name")
        def known(state, call):
            """Never called."""

        assert RULES["first_name"] is RULES["second_name"] is known
    finally:
        del RULES["first_name"], RULES["second_name"]


def test_linear_operators_keep_zero() -> None:
    assert LINEAR < KEEPS_ZERO
