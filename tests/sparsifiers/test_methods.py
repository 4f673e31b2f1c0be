import pytest
import torch
from torch import nn

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


BELOW_ONE = {"sbp": 0.99, "generalized-dropout": 0.94}
"""Methods whose gates begin with a smaller value; the others begin at 1."""


@pytest.mark.parametrize("method", METHODS)
def test_a_default_call_leaves_evaluation_as_it_is(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)).eval()
    x = torch.randn(20, 4)
    before = model(x)
    gated = hc.attach_gates(model, x[:2], method=method, keep_mean=method in BELOW_ONE)
    assert (gated(x) - before).abs().max() < 1e-3 * before.abs().max()
    values = gated.gates.readout()
    assert (values >= BELOW_ONE.get(method, 0.999)).all()
    assert (values < 0.999).any() == (method in BELOW_ONE)
