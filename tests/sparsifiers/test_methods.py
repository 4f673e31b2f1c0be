import pytest

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers import METHODS, RectifiedGates, method_of
from tests.sparsifiers.families import FixedMask


def test_what_method_takes() -> None:
    family = FixedMask()
    assert method_of(family) is family
    assert method_of("hard-concrete").gate is hc.HardConcrete


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("hard-conrete", "'hard-conrete' is not known; use 'hard-concrete'"),
        ("zzz", "is not known; use " + " or ".join(map(repr, METHODS))),
        (RectifiedGates, "takes a RectifiedGates, made with its settings, not its class"),
        (hc.HardConcrete, r"a Sparsifier such as RectifiedGates\(.*, not a type"),
        (3, "not a int"),
    ],
)
def test_other_methods_are_refused(method: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        method_of(method)
