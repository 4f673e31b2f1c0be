"""A default call leaves what a trained model computes in evaluation as it is."""

import copy

import pytest
import torch

import hardconcrete as hc
from tests.exactness import apart, outputs
from tests.zoo import GATED, Entry


@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_gates_change_nothing_in_evaluation(entry: Entry) -> None:
    torch.manual_seed(0)
    model, inputs = entry.build().eval(), entry.inputs(2)
    before = outputs(model, copy.deepcopy(inputs))
    gated = hc.attach_gates(model, *copy.deepcopy(inputs))
    assert all((z == 1).all() for z in gated.gate_values().values())
    assert apart(before, outputs(gated, inputs)) <= 1e-3
