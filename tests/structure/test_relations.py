import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.structure.relations import Relations, selecting_layers
from hardconcrete.structure.trace import trace
from hardconcrete.structure.walk import walk
from tests.compaction.networks import dense


def test_who_reads_and_makes() -> None:
    model = dense()
    relations = Relations(walk(trace(model, (torch.randn(2, 4),)), model))
    first = relations.units_of(hc.find_groups(model, torch.randn(2, 4))["0"])
    assert relations.read["2.weight", 1] == relations.made["0.weight", 0] == set(first)
    assert relations.only_read(("2.weight", 1)) == set(first)
    assert relations.only_read(("0.weight", 0)) == set()
    assert set(first) < relations.removable
    assert not relations.disturbed


def test_layers_that_can_select() -> None:
    model = nn.ModuleDict({
        "linear": nn.Linear(4, 3), "conv": nn.Conv2d(2, 3, 1), "norm": nn.BatchNorm1d(3),
        "grouped": nn.Conv2d(4, 4, 1, groups=2), "transposed": nn.ConvTranspose2d(2, 3, 1),
        "tied": nn.Linear(4, 4), "to_it": nn.Linear(4, 4),
    })  # fmt: skip
    model["to_it"].weight = model["tied"].weight
    assert selecting_layers(model) == {"linear.weight": "linear", "conv.weight": "conv"}
    assert selecting_layers(nn.Linear(2, 2)) == {"weight": ""}
