"""Gates put on again, for groups that have become smaller."""

from dataclasses import replace

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.gating.placement import put_gates_on
from hardconcrete.units.group import in_order


def test_tables_are_made_anew_and_gates_multiply_what_is_left() -> None:
    """A convolution's maps, four inputs of the dense layer each, of which one map is gone."""
    layers = nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(12, 2, bias=False)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(1, 1, 3, 3)).eval()
    (group,), bank = gated.groups, gated.gates
    model = hc.remove_gates(gated)
    units = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    smaller = in_order([replace(group, axes=(replace(group.gated[0], units=units),), units=2)])
    layers[2].weight.data = torch.ones(2, 8)
    bank.log_alpha.data = torch.tensor([-9.0, 9.0])
    put_gates_on(model, smaller, bank)
    assert bank.sizes == (2,)
    assert [len(table) for table in bank.tables] == [8]
    assert layers[2].weight.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]] * 2
