import copy

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.gating.folding import fold, gate_masks
from tests.compaction.networks import dense
from tests.exactness import at_random


def test_masks_multiply_where_gates_are_nested() -> None:
    gated = at_random(hc.attach_gates(dense(), torch.randn(3, 4), sites=["2:in", "2:out"]))
    values = gated.gate_values()
    found = gate_masks(gated, gated.model, gated.gates.readout())
    assert found.keys() == {"2.weight", "2.bias"}
    torch.testing.assert_close(found["2.weight"], torch.outer(values["2:out"], values["2:in"]))


def test_gates_in_the_weights_compute_the_same() -> None:
    """Also where one weight is shared, which is multiplied once."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    first.weight = last.weight
    model, x = nn.Sequential(first, nn.Tanh(), last), torch.randn(3, 4)
    gated = at_random(hc.attach_gates(model, x, sites=["0:in"])).eval()
    plain = hc.remove_gates(copy.deepcopy(gated))
    fold(gated, plain, gated.gates.readout())
    torch.testing.assert_close(plain(x), gated(x))
