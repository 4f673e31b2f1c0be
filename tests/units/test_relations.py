import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.graph.propagate import propagate
from hardconcrete.graph.trace import trace
from hardconcrete.units.relations import Relations, selecting_layers
from tests.compaction.networks import dense


def relations_of(model: nn.Module, inputs: int) -> Relations:
    return Relations(propagate(trace(model, (torch.randn(2, inputs),)), model))


def test_who_reads_and_makes() -> None:
    model = dense()
    relations = relations_of(model, 4)
    first = relations.units_of(hc.find_groups(model, torch.randn(2, 4))["0"])
    assert relations.read["2.weight", 1] == relations.made["0.weight", 0] == set(first)
    assert relations.only_read(("2.weight", 1)) == set(first)
    assert relations.only_read(("0.weight", 0)) == set()
    assert set(first) < relations.removable
    assert not relations.zero_lost


class Layers(nn.Module):
    """Some that can select among their inputs, some that cannot, and one whose weight is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)
        self.norm, self.grouped = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, groups=2)
        self.transposed = nn.ConvTranspose2d(4, 4, 1)
        self.tied, self.to_it, self.taken = (nn.Linear(4, 4) for _ in range(3))
        self.to_it.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.linear(x)[..., None, None]))
        x = self.taken(self.to_it(self.tied(self.transposed(self.grouped(x)).flatten(1))))
        return nn.functional.linear(x, self.taken.weight.t())


def test_layers_that_can_select() -> None:
    found = selecting_layers(model := Layers().eval(), relations_of(model, 4))
    assert found == {"linear.weight": "linear", "conv.weight": "conv"}
    alone = nn.Linear(2, 2)
    assert selecting_layers(alone, relations_of(alone, 2)) == {"weight": ""}
