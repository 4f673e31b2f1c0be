import copy

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.graph.propagate import propagate
from hardconcrete.graph.trace import trace
from hardconcrete.units.liveness import Liveness
from hardconcrete.units.relations import Relations
from hardconcrete_paper.models import LeNet5
from tests.compaction.networks import Joined, dense, gap

pytestmark = pytest.mark.filterwarnings("ignore:.*and the model is not smaller for it")

PAPER = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]


def kept(small: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: left.kept for name, left in hc.CompactionPlan.of(small).groups.items()}


def with_open(gated: hc.GatedModel) -> hc.GatedModel:
    nn.init.constant_(gated.gates.log_alpha, 9.0)
    return gated


def shut(gated: hc.GatedModel, group: str, units: object) -> None:
    own = next(g for g in gated.groups if g.name == group)
    gated.gates.log_alpha.data[own.slice][units] = -9.0


@pytest.fixture(scope="module")
def lenet() -> hc.GatedModel:
    torch.manual_seed(0)
    model = LeNet5()
    for bias in (model.conv1.bias, model.conv2.bias, model.fc1.bias):
        nn.init.uniform_(bias, 0.5, 1.0)
    return with_open(hc.attach_gates(model, torch.randn(2, 1, 28, 28), sites=PAPER))


def test_a_map_whose_inputs_to_the_next_layer_are_all_shut_is_dead(lenet: hc.GatedModel) -> None:
    gated = copy.deepcopy(lenet)
    shut(gated, "fc1:in", slice(16 * 7, 16 * 8))
    shut(gated, "fc1:in", slice(16 * 9, 16 * 10 - 1))  # one is left: the map lives
    small = hc.compact(gated)
    assert kept(small)["conv2"] == tuple(k for k in range(50) if k != 7)
    assert small.fc1.kept_inputs.numel() == 800 - 16 - 15
    assert gap(gated, small, torch.randn(3, 1, 28, 28)) < 1e-5


def test_a_map_that_is_shut_with_its_bias_is_dead(lenet: hc.GatedModel) -> None:
    gated = copy.deepcopy(lenet)
    shut(gated, "conv1:out", [0, 5])
    shut(gated, "conv2:out", [49])
    small = hc.compact(gated)
    assert kept(small)["conv1"] == tuple(k for k in range(20) if k not in (0, 5))
    assert kept(small)["conv2"] == tuple(range(49))
    assert (small.conv2.in_channels, small.fc1.in_features) == (18, 784)
    assert gap(gated, small, torch.randn(3, 1, 28, 28)) < 1e-5


def test_death_runs_back_through_layers(lenet: hc.GatedModel) -> None:
    """Nothing reads fc1, so nothing reads conv2, so nothing reads conv1: one of each stays."""
    gated = copy.deepcopy(lenet)
    shut(gated, "fc2:in", slice(None))
    small = hc.compact(gated)
    assert {name: len(units) for name, units in kept(small).items()} == {
        "conv1": 1, "conv2": 1, "fc1": 1,
    }  # fmt: skip
    assert gap(gated, small, torch.randn(3, 1, 28, 28)) < 1e-5


class Between(nn.Module):
    """Something between a gated output and what reads it."""

    def __init__(self, between: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(4, 6, bias=bias), between, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


@pytest.mark.parametrize(
    ("between", "goes"),
    [
        (nn.ReLU(), True),
        (nn.Tanh(), True),
        (nn.Dropout(0.5), True),
        (nn.Sigmoid(), False),
        (nn.Softplus(), False),
        (nn.BatchNorm1d(6), False),
    ],
)
def test_a_unit_that_is_zero_goes_if_it_stays_zero(between: nn.Module, goes: bool) -> None:
    model = Between(between)
    for parameter in between.parameters():
        nn.init.uniform_(parameter, 0.5, 1.0)
    gated = with_open(hc.attach_gates(model, torch.randn(3, 4), sites=["a:out"]))
    shut(gated, "a:out", [1, 4])
    small = hc.compact(gated)
    assert kept(small)["a"] == ((0, 2, 3, 5) if goes else tuple(range(6)))
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_single_weights(bias: bool) -> None:
    """Zeros are exact; columns of zeros go, and rows where no bias is left."""
    gated = hc.attach_gates(Between(nn.ReLU(), bias), torch.randn(3, 4), sites=["a:each", "b:each"])
    with_open(gated)
    rows = torch.ones(6, 4)
    rows[2], rows[4, 1:] = 0, 0
    columns = torch.ones(2, 6)
    columns[:, 3], columns[0, 5] = 0, 0
    gated.gates.log_alpha.data[torch.cat([rows.flatten(), columns.flatten()]) == 0] = -9.0
    small = hc.compact(gated)
    left = (0, 1, 2, 4, 5) if bias else (0, 1, 4, 5)
    assert kept(small)["a"] == left
    assert torch.equal(small.a.weight == 0, rows[list(left)] == 0)
    assert torch.equal(small.b.weight == 0, columns[:, list(left)] == 0)
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


class BothWays(nn.Module):
    """One weight makes the units and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.weight, self.bias).relu()
        return nn.functional.linear(h, self.weight.t())


@pytest.mark.parametrize(("tensor", "goes"), [("bias", False), ("weight", True)])
def test_a_weight_that_makes_and_reads(tensor: str, goes: bool) -> None:
    gated = with_open(hc.attach_gates(BothWays(), torch.randn(3, 4), sites=[hc.Site(tensor, 0)]))
    shut(gated, f"{tensor}:0", [1, 4])
    small = hc.compact(gated)
    assert small.weight.shape == ((4, 4) if goes else (6, 4))
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


@pytest.mark.parametrize("least", [1, 2, 4])
def test_the_likeliest_are_kept(least: int) -> None:
    """The gates of the layer before say nothing of which these are."""
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    locations = [9.0] * 6 + [-9.0, -5.0, -8.0, -4.0, -6.0]
    gated.gates.log_alpha.data.copy_(torch.tensor(locations))
    small = hc.compact(gated, min_units=least)
    assert kept(small)["2"] == tuple(sorted([3, 1, 4, 2][:least]))
    assert small[4].in_features == least
    assert type(small[4]) is nn.Linear
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


def test_a_unit_that_is_kept_to_make_up_the_number_is_read_too() -> None:
    """Its column is zeros; a layer that selected around it would not have the width asked for."""
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    gated.gates.log_alpha.data.copy_(torch.tensor([9.0] * 7 + [-5.0, -8.0, -4.0, -6.0]))
    small = hc.compact(gated, min_units=3)
    assert kept(small)["2"] == (0, 1, 3)
    assert (type(small[4]), small[4].in_features) == (nn.Linear, 3)
    assert (small[4].weight[:, 1:] == 0).all()
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


def test_the_likeliest_by_the_gates_of_the_paper(lenet: hc.GatedModel) -> None:
    gated = copy.deepcopy(lenet)
    shut(gated, "conv2:out", slice(None))
    shut(gated, "fc1:in", slice(0, 400))
    group = next(g for g in gated.groups if g.name == "conv2:out")
    gated.gates.log_alpha.data[group.start + 3] = -4.0  # its readers are shut
    gated.gates.log_alpha.data[group.start + 33] = -5.0
    assert kept(hc.compact(gated))["conv2"] == (33,)


@pytest.mark.filterwarnings("ignore:no gate is open")
def test_each_group_keeps_its_least_and_no_more_than_it_has() -> None:
    gated = hc.attach_gates(Joined(), torch.randn(3, 4))
    nn.init.constant_(gated.gates.log_alpha, -9.0)
    assert {n: len(k) for n, k in kept(hc.compact(gated)).items()} == {"left": 1, "right": 1}
    assert {n: len(k) for n, k in kept(hc.compact(gated, min_units=6)).items()} == {
        "left": 6, "right": 5,
    }  # fmt: skip


def test_who_is_read_and_made() -> None:
    model = dense()
    labelled = propagate(trace(model, (torch.randn(2, 4),)), model)
    liveness = Liveness(labelled, Relations(labelled), {})
    assert liveness.settle() == set()
    assert len(liveness.relations.removable) == 11
    assert (
        liveness.relations.read["2.weight", 1]
        == liveness.relations.made["0.weight", 0]
        == set(liveness.roots["0.bias", 0].tolist())
    )
