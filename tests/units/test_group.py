"""What is found, against numbers worked out by hand; the promises of ``find_groups``."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.units import Group
from hardconcrete.units.grouping import producer
from hardconcrete_paper.models import LeNet5
from tests.graph.operators.contract import Network, parameter


class Block(nn.Module):
    """A residual stream of 8 maps, a square convolution on it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.square = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.norm(self.square(h)).relu()
        return self.head(h.mean((2, 3)))


def summary(found: hc.Analysis) -> list[Any]:
    """All that is said of the units."""
    return [
        (g.name, g.kind, g.units, g.parameters, g.macs,
         [(str(axis), axis.gated, axis.units.tolist()) for axis in g.axes])
        for g in found
    ] + [str(fixed) for fixed in found.fixed]  # fmt: skip


def cost(group: Group) -> tuple[int, int, int]:
    return group.units, group.parameters, group.macs


def test_lenet5_by_hand() -> None:
    found = hc.find_groups(LeNet5(), torch.zeros(2, 1, 28, 28))
    # 25 weights and a bias, and 25 weights of each of 50 maps; 24 x 24 and 8 x 8 places
    assert cost(found["conv1"]) == (20, 26 + 50 * 25, 24 * 24 * 25 + 8 * 8 * 50 * 25)
    # 16 places of a map are read by 500 units
    assert cost(found["conv2"]) == (50, 501 + 16 * 500, 8 * 8 * 500 + 16 * 500)
    assert cost(found["fc1"]) == (500, 801 + 10, 800 + 10)
    assert [str(axis) for axis in found["conv2"].coupled] == ["conv2.weight[0]", "conv2.bias[0]"]
    (gated,) = found["conv2"].gated
    assert gated.units.tolist() == [k // 16 for k in range(800)]
    assert {group.kind for group in found} == {"feature map", "neuron"}


def test_row_and_column_of_the_same_unit_count_once() -> None:
    """A map of the stream owns 9 x (8 + 8 - 1) of the 9 x 64 weights of the square layer."""
    found = hc.find_groups(Block(), torch.zeros(2, 3, 8, 8))
    (group,) = found
    assert cost(group) == (8, 27 + 9 * 15 + 1 + 2 + 4, 64 * 27 + 64 * 9 * 15 + 4)
    assert [str(axis) for axis in group.gated] == ["square.weight[1]", "head.weight[1]"]
    assert "norm.running_mean[0]" in [str(axis) for axis in group.coupled]


def test_grouped_convolution_by_hand() -> None:
    """4 groups of 2 maps in and 3 out: a unit is a map of every group."""
    layers = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4), nn.Conv2d(12, 5, 1)
    found = hc.find_groups(nn.Sequential(*layers), torch.zeros(2, 3, 4, 4))
    assert cost(found["0"]) == (2, 4 * (3 + 1) + 12 * 9, 16 * 4 * 3 + 4 * 12 * 9)
    assert cost(found["1"]) == (3, 4 * (2 * 9 + 1) + 4 * 5, 4 * 4 * 2 * 9 + 4 * 4 * 5)


def test_tied_weights_by_hand() -> None:
    """One tensor is counted once, and its multiply-adds as often as it is used."""
    model = Network(
        lambda net, x: (net.encode(x).relu() @ net.encode.weight) + net.bias,
        encode=nn.Linear(9, 7),
        bias=parameter(9),
    )
    (group,) = hc.find_groups(model, torch.zeros(2, 9))
    assert cost(group) == (7, 9 + 1, 9 + 9)
    assert [str(axis) for axis in group.gated] == ["encode.weight[0]"]


def test_a_layer_that_is_called_twice() -> None:
    layers = {"inp": nn.Linear(5, 8), "twice": nn.Linear(8, 8), "out": nn.Linear(8, 3)}
    model = Network(lambda net, x: net.out(net.twice(net.twice(net.inp(x)).relu())), **layers)
    (group,) = hc.find_groups(model, torch.zeros(2, 5))
    assert cost(group) == (8, 6 + 15 + 1 + 3, 5 + 2 * 15 + 3)


def test_same_answer_in_every_mode_precision_batch_and_run() -> None:
    model = Block().eval()
    expected = summary(hc.find_groups(model, torch.zeros(2, 3, 8, 8)))
    assert expected == summary(hc.find_groups(model.train(), torch.zeros(2, 3, 8, 8)))
    assert expected == summary(hc.find_groups(model, torch.zeros(1, 3, 8, 8)))
    assert expected == summary(hc.find_groups(model.requires_grad_(False), torch.zeros(7, 3, 8, 8)))
    half = model.to(torch.bfloat16)
    assert expected == summary(hc.find_groups(half, torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)))
    meta = model.float().to("meta")
    assert expected == summary(hc.find_groups(meta, torch.zeros(2, 3, 8, 8, device="meta")))


def test_nested_inputs_and_outputs() -> None:
    def forward(net: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        h = net.inp(batch["pair"][0]).relu() * batch["pair"][1]
        return {"a": net.a(h), "rest": (net.b(h), [h.sum()])}

    layers = {"inp": nn.Linear(6, 12), "a": nn.Linear(12, 4), "b": nn.Linear(12, 3)}
    model = Network(forward, **layers)
    inputs = {"pair": (torch.zeros(2, 6), torch.zeros(2, 1))}
    found = hc.find_groups(model, (inputs,))
    assert found.names == ()  # the sum over all units is an output
    assert any("sum reads all of them" in str(entry) for entry in found.fixed)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.fc = nn.Linear(6, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, ids: Tensor, *, scale: Tensor, twice: bool = False, extra: Any = None):
        h = self.fc(self.embed(ids)).relu() * scale[:, None, None]
        return self.out(h + h if twice else h) if extra is None else extra


def test_integer_inputs_and_keywords() -> None:
    kwargs = {"scale": torch.ones(2), "twice": True, "extra": None}
    found = hc.find_groups(Several(), torch.zeros(2, 5, dtype=torch.int64), kwargs)
    assert [(g.name, g.units, g.kind) for g in found] == [
        ("embed", 6, "embedding dimension"),
        ("fc", 8, "neuron"),
    ]
    assert found["embed"].parameters == 9 + 8
    assert found["embed"].macs == 5 * 8


def test_input_features_on_request() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    found = hc.find_groups(model, torch.zeros(2, 6), input_features=True)
    first = found[0]
    assert (first.kind, first.units, first.parameters, first.macs) == ("input feature", 6, 5, 5)
    assert [str(axis) for axis in first.axes] == ["0.weight[1]"]
    assert hc.find_groups(model, torch.zeros(2, 6)).names == ("0",)


def test_models_without_parameters_or_units() -> None:
    assert len(hc.find_groups(nn.ReLU(), torch.zeros(2, 6))) == 0
    assert hc.find_groups(nn.ReLU(), torch.zeros(2, 6)).fixed == ()
    (fixed,) = hc.find_groups(nn.Linear(6, 4), torch.zeros(2, 6)).fixed
    assert (fixed.name, fixed.units, fixed.reason.operator) == ("weight", 4, "output")


def test_fixed_units_say_where_and_why() -> None:
    layers = nn.Linear(6, 5), nn.Sequential(nn.Softmax(-1), nn.Linear(5, 4))
    found = hc.find_groups(nn.Sequential(*layers), torch.zeros(2, 6))
    (first, _) = found.fixed
    assert (first.name, first.units) == ("0", 5)
    assert (first.reason.module, first.reason.operator) == ("1.0", "softmax")


def test_a_printed_tree() -> None:
    found = hc.find_groups(Block(), torch.zeros(2, 3, 8, 8))
    tree = str(found).removesuffix(f"\n{found.savings}")
    assert tree.splitlines() == [
        "Block: 8 units in 1 group",
        "└─ stem: 8 feature maps, each 169 parameters and 10,372 MACs",
        "   ├─ gated by   square.weight[1], head.weight[1]",
        "   └─ cut along  stem.weight[0], square.weight[0], square.bias[0], norm.weight[0], "
        "norm.bias[0], norm.running_mean[0], norm.running_var[0]",
        "fixed",
        "└─ head: 4 fixed: the model's output (output in the model itself)",
    ]


def test_groups_by_place_name_and_in_order() -> None:
    found = hc.find_groups(LeNet5(), torch.zeros(2, 1, 28, 28))
    assert [group.name for group in found] == [*found.names] == ["conv1", "conv2", "fc1"]
    assert (len(found), found[1] is found["conv2"]) == (3, True)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("fc.weight", "fc"),
        ("weight", "weight"),
        ("block.scale", "block.scale"),
        ("fc.parametrizations.weight.original0", "fc"),
    ],
)
def test_the_module_that_a_parameter_speaks_for(name: str, module: str) -> None:
    assert producer(name) == module
