"""Costs of gates against the count of the compacted model, and against enumeration."""

import copy
import itertools
import math
import pickle
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.cost.ledger import KINDS, _any_probability
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete_paper.models import LeNet5
from tests.compaction.networks import dense
from tests.exactness import at_random
from tests.zoo import GATED, Entry, gated_network

PAPER = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]
pytestmark = pytest.mark.filterwarnings(
    "ignore:no gate is open", "ignore:.*and the model is not smaller for it"
)


def counted(gated: hc.GatedModel) -> list[int]:
    args, kwargs = gated.example
    found = hc.count(hc.compact(gated), args, kwargs)
    return [getattr(found, kind) for kind in KINDS]


def delivered(gated: hc.GatedModel) -> list[float]:
    return [gated.delivered(kind).item() for kind in KINDS]


def expected(gated: hc.GatedModel) -> list[float]:
    return [gated.expected(kind).item() for kind in KINDS]


def decide(gated: hc.GatedModel, seed: int, share: float = 0.5) -> None:
    """Gates at 0 and 1, at least one of each group open."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for group in gated.groups:
            is_open = torch.rand(group.units, generator=generator) < share
            is_open[seed % group.units] = True
            gated.gates.log_alpha[group.slice] = torch.where(is_open, 90.0, -90.0)


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_costs_of_the_zoo_equal_those_of_its_compacted_models(entry: Entry) -> None:
    gated = at_random(gated_network(entry))
    dense_count = hc.count(copy.deepcopy(entry.build()), *gated.example)
    assert gated.ledger.dense.tolist() == [getattr(dense_count, kind) for kind in KINDS]
    assert delivered(gated) == counted(gated)
    for seed in range(2):
        assert_decided_costs(gated, seed)


def assert_decided_costs(gated: hc.GatedModel, seed: int) -> None:
    """Where no gate is in doubt, expected and delivered costs are those of the compacted model."""
    decide(gated, seed)
    found = counted(gated)
    assert delivered(gated) == found
    assert expected(gated) == pytest.approx(found, rel=1e-12)


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_the_zoo_with_whole_groups_closed(entry: Entry) -> None:
    """A closed group removes what only it reads or makes, and each group keeps a unit."""
    gated = gated_network(entry)
    for shut in range(min(len(gated.groups), 3)):
        decide(gated, shut, 0.8)
        gated.gates.log_alpha.data[gated.groups[shut].slice] = -90.0
        found = counted(gated)
        assert delivered(gated) == found
        assert expected(gated) == pytest.approx(found, rel=1e-12)


class Tiny(nn.Module):
    """LeNet-5 in small: 2 maps, 2 maps of 2 x 2 places, 2 neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 2)
        self.fc1, self.fc2 = nn.Linear(8, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


def by_hand(z: dict[str, Tensor]) -> tuple[float, float]:
    """Parameters and MACs of the tiny LeNet for two examples, from the units that are alive."""
    inputs = z["conv2:out"].repeat_interleave(4) * z["fc1:in"]
    first, hidden = z["conv1:out"].sum(), z["fc2:in"].sum()
    second = inputs.view(2, 4).amax(1).sum()
    params = first * 10 + second * (4 * first + 1) + hidden * (inputs.sum() + 1) + 3 * hidden + 3
    macs = first * 9 * 9 + second * first * 4 * 4 + hidden * inputs.sum() + 3 * hidden
    return float(params), 2 * float(macs)


def states_of(gated: hc.GatedModel) -> tuple[Tensor, Tensor]:
    """All states of the gates, and their probabilities."""
    p = gated.gates.distribution().open_probability.detach().double()
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(p))), dtype=torch.float64)
    return states, torch.where(states == 1, p, 1 - p).prod(1)


def test_nested_gates_against_all_their_states_by_hand() -> None:
    """14 gates, one unit of each group open: a map is alive if one of its inputs to fc1 is."""
    gated = hc.attach_gates(Tiny(), torch.randn(2, 1, 5, 5), sites=PAPER)
    nn.init.normal_(gated.gates.log_alpha)
    gated.gates.log_alpha.data[[0, 2, 4, 12]] = 90.0
    total = torch.zeros(2, dtype=torch.float64)
    for z, weight in zip(*states_of(gated), strict=True):
        if weight:
            total += weight * torch.tensor(by_hand(gated.by_group(z)), dtype=torch.float64)
    assert expected(gated)[:2] == pytest.approx(total.tolist(), rel=1e-10)


@pytest.mark.parametrize("log_alpha", [0.0, -2.0, -4.0, -30.0])
def test_nested_gates_against_all_their_states(log_alpha: float) -> None:
    """Groups of two are often empty, and remove others: 16,384 states."""
    gated = hc.attach_gates(Tiny(), torch.randn(2, 1, 5, 5), sites=PAPER)
    nn.init.normal_(gated.gates.log_alpha, log_alpha)
    states, weights = states_of(gated)
    mean = weights @ torch.vmap(gated.ledger.cost)(states)
    assert expected(gated)[:2] == pytest.approx(mean[:2].tolist(), rel=1e-12)


def test_gradients_where_groups_are_often_empty() -> None:
    """Gradients of the mean, with what an empty group removes."""
    gated = hc.attach_gates(Tiny(), torch.randn(2, 1, 5, 5), sites=PAPER)
    nn.init.normal_(gated.gates.log_alpha, -2.0)
    ledger, p = gated.ledger, gated.gates.distribution().open_probability.detach().double()
    slopes = torch.autograd.functional.jacobian(ledger.mean, p)
    for gate, step in enumerate(1e-4 * torch.eye(len(p), dtype=torch.float64)):
        both = ledger.mean(p + step) - ledger.mean(p - step)
        assert slopes[:2, gate].tolist() == pytest.approx((both[:2] / 2e-4).tolist(), rel=1e-6)


def test_the_count_by_hand_equals_the_delivered_cost() -> None:
    gated = hc.attach_gates(Tiny(), torch.randn(2, 1, 5, 5), sites=PAPER)
    for seed in range(10):
        decide(gated, seed, 0.7)
        by_group = gated.by_group(gated.gates.readout().detach())
        assert delivered(gated)[:2] == list(by_hand(by_group))
        assert delivered(gated) == counted(gated)


@pytest.mark.unwatched
@pytest.mark.parametrize("log_alpha", [-8.0, -10.0, -15.0, -20.0])
def test_a_group_that_is_almost_closed(log_alpha: float) -> None:
    """Its last unit stays, and what only it read is removed: LeNet-5's 50 maps."""
    gated = hc.attach_gates(LeNet5(), torch.zeros(1, 1, 28, 28))
    gated.gates.log_alpha.data.fill_(20.0)[gated.groups[1].slice] = log_alpha
    p = gated.gates.distribution().open_probability.detach()
    draws = torch.rand(1000, len(p), generator=torch.Generator().manual_seed(0)) < p
    costs = torch.vmap(gated.ledger.cost)(draws.double())
    mean, error = costs.mean(0), costs.std(0) / 1000**0.5
    assert ((gated.ledger.mean(p) - mean).abs() <= 5 * error + 1e-3 * mean).all()
    assert gated.ledger.cost(p).tolist() == pytest.approx(mean.tolist(), rel=0.1)


def test_the_cost_of_a_budget_is_near_the_mean() -> None:
    """By the numbers that docs/budgets.md gives; not near in a deep network of tiny layers."""
    for width, p, above in ((3, 0.5, 0.047), (20, 0.3, 0.0006)):
        layers = nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        gated = hc.attach_gates(nn.Sequential(*layers, nn.Linear(width, 2)), torch.zeros(1, 40))
        gates = torch.full((2 * width,), p, dtype=torch.float64)
        found = gated.ledger.cost(gates)[1] / gated.ledger.mean(gates)[1] - 1
        assert found.item() == pytest.approx(above, rel=0.1)
    deep, half = chain(10, 3), torch.full((30,), 0.5, dtype=torch.float64)
    assert 0.2 < deep.ledger.cost(half)[1] / deep.ledger.mean(half)[1] - 1 < 0.5


def chain(layers: int, units: int) -> hc.GatedModel:
    """A group in every layer; each one that is empty removes all others."""
    parts = [nn.Linear(units, units) for _ in range(layers)]
    return hc.attach_gates(nn.Sequential(*parts, nn.Linear(units, 2)), torch.zeros(1, units))


@pytest.mark.unwatched
@pytest.mark.parametrize(("layers", "tolerance"), [(10, 0.0), (20, 0.01)])
def test_draws_of_a_chain_cost_the_mean(layers: int, tolerance: float) -> None:
    """Exact for twelve groups in doubt, and within a hundredth for twenty."""
    gated = chain(layers, 2)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(20_000, 2 * layers, generator=generator) < 0.5
    costs = torch.vmap(gated.ledger.cost, chunk_size=5000)(draws.double())
    mean, error = costs.mean(0), costs.std(0) / 20_000**0.5
    found = gated.ledger.mean(torch.full((2 * layers,), 0.5))
    assert ((found - mean).abs() <= 5 * error + tolerance * mean).all()


@pytest.mark.unwatched
@pytest.mark.parametrize("shut", [0, 69])
def test_a_long_chain_with_one_closed_group(shut: int) -> None:
    gated = chain(70, 3)
    decide(gated, 0, 1.0)
    gated.gates.log_alpha.data[gated.groups[shut].slice] = -90.0
    assert delivered(gated) == counted(gated)


class Residual(nn.Module):
    """Both sides of ``mix`` are the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.b = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + self.mix(h).relu())


@pytest.mark.parametrize("sites", ["auto", ["mix:in", "b:in"], ["mix:out"]])
def test_units_on_both_sides_of_a_weight(sites: str | list[str]) -> None:
    """The mean over all states; if mix has no input left it does not select (once in 10^8)."""
    gated = hc.attach_gates(Residual(), torch.randn(2, 3), sites=sites)
    nn.init.normal_(gated.gates.log_alpha, 1.0)
    states, weights = states_of(gated)
    mean = weights @ torch.vmap(gated.ledger.cost)(states)
    assert expected(gated)[:2] == pytest.approx(mean[:2].tolist(), rel=1e-7)


def assert_draws_cost_the_mean(gated: hc.GatedModel, number: int, log_alpha: float = 0.0) -> None:
    """Within five standard errors; an event that all draws may miss adds a draw of all units."""
    nn.init.normal_(gated.gates.log_alpha, log_alpha)
    generator = torch.Generator().manual_seed(0)
    p = gated.gates.distribution().open_probability.detach()
    draws = torch.rand(number, len(p), generator=generator) < p
    costs = torch.vmap(gated.ledger.cost)(draws.double())
    error = 5 * costs.std(0) / number**0.5 + gated.ledger.cost(torch.ones(len(p)).double()) / number
    assert ((costs.mean(0) - torch.tensor(expected(gated))).abs() <= error).all()


def test_draws_of_nested_gates_cost_the_mean(lenet: hc.GatedModel) -> None:
    assert_draws_cost_the_mean(copy.deepcopy(lenet), 2000)


@pytest.mark.unwatched
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_draws_of_the_zoo_cost_the_mean(entry: Entry) -> None:
    """Also for gates that are open so rarely that groups are often empty."""
    gated = gated_network(entry)
    for log_alpha in (0.0, -3.0, -5.0):
        assert_draws_cost_the_mean(gated, 400, log_alpha)


@pytest.fixture(scope="module")
def lenet() -> hc.GatedModel:
    torch.manual_seed(0)
    gated = hc.attach_gates(LeNet5(), torch.zeros(1, 1, 28, 28), sites=PAPER)
    _ = gated.ledger
    return gated


@pytest.mark.parametrize("seed", range(3))
def test_lenet_with_the_paper_s_gates(lenet: hc.GatedModel, seed: int) -> None:
    assert_decided_costs(copy.deepcopy(lenet), seed)


def test_pixels_are_selected() -> None:
    """Indices of the inputs that are kept are part of the small model's bytes."""
    gated = hc.attach_gates(
        MLP(inputs=20, hidden=(9, 8)), torch.zeros(2, 20), sites=["fc1:in", "fc2:in", "fc3:in"]
    )
    for seed in range(3):
        assert_decided_costs(gated, seed)
    gated.gates.log_alpha.data[:20] = -90.0  # without any input nothing is selected
    assert delivered(gated) == counted(gated)


class Branch(nn.Module):
    """Units without gates inside a branch that gated units can close."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)
        self.c, self.fc = nn.Conv2d(16, 8, 1), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        beside = self.c(self.b(x).relu())
        return self.fc(torch.cat([beside, x], 1).mean((2, 3)))


@pytest.mark.parametrize("sites", [["c:out"], ["fc:in"], ["c:out", "fc:in"], ["a:out", "c:out"]])
def test_a_closed_branch_removes_its_inner_units(sites: list[str]) -> None:
    gated = hc.attach_gates(Branch(), torch.randn(2, 3, 2, 2), sites=sites)
    for seed in range(8):
        drawn = torch.rand(len(gated.gates.log_alpha), generator=torch.manual_seed(seed))
        gated.gates.log_alpha.data.copy_(torch.where(drawn < 0.1 + 0.1 * (seed % 3), 50.0, -50.0))
        assert delivered(gated) == counted(gated)


class Joined(nn.Module):
    """Units that two layers read, of which the second also reads what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.c, self.d, self.fc = nn.Conv2d(5, 3, 1), nn.Conv2d(8, 2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.a(x), self.b(x)], 1)
        z = self.c(y.relu()).relu()
        return self.fc(self.d(torch.cat([y, z], 1)).relu().mean((2, 3)))


class Apart(nn.Module):
    """Two branches that read overlapping parts of the same units, and a channel of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 6, 1), nn.Conv2d(5, 3, 1), nn.Conv2d(4, 2, 1)
        self.d, self.fc = nn.Conv2d(5, 3, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        padded = nn.functional.pad(y[:, :4], (0, 0, 0, 0, 0, 1))
        z = torch.cat([self.b(padded).relu(), self.c(y[:, 2:]).relu()], 1)
        return self.fc(self.d(z).relu().mean((2, 3)))


class Transposed(nn.Module):
    """A weight that is also used the other way round, and a layer with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.tied, self.out = nn.Conv2d(3, 4, 1), nn.Linear(4, 3), nn.Linear(7, 2)
        self.one, self.two = nn.Linear(1, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x).mean((2, 3))
        z = self.tied(x.relu()).tanh()
        back = nn.functional.linear(z, self.tied.weight.t())
        return self.out(torch.cat([z, back], 1)), self.two(self.one(x.mean(1, keepdim=True)))


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("network", "sites"),
    [
        (Joined, ["c:in", "d:in"]),
        (Joined, ["c:out", "d:in"]),
        (Joined, ["a:in", "b:out", "c:in", "c:out", "d:in", "fc:in"]),
        (Apart, ["b:in", "c:in", "d:in"]),
        (Apart, ["a:out", "b:in", "d:out"]),
        (Apart, "auto"),
        (Transposed, ["tied:in", "tied:out", "out:in", "one:in"]),
    ],
)
def test_units_that_several_layers_read_are_removed_one_by_one(
    network: type[nn.Module], sites: str | list[str]
) -> None:
    assert_drawn_states_cost_what_is_counted(network, sites)


def assert_drawn_states_cost_what_is_counted(
    network: type[nn.Module], sites: str | list[str]
) -> None:
    gated = hc.attach_gates(network(), torch.randn(2, 3, 2, 2), sites=sites)
    for seed in range(6):
        drawn = torch.rand(len(gated.gates.log_alpha), generator=torch.manual_seed(seed))
        gated.gates.log_alpha.data.copy_(torch.where(drawn < 0.15 + 0.1 * (seed % 6), 50.0, -50.0))
        found = counted(gated)
        assert delivered(gated) == found
        assert expected(gated) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("log_alpha", [0.5, -2.0])
@pytest.mark.parametrize(
    ("network", "sites"),
    [(Joined, ["c:in", "d:in"]), (Apart, ["b:in", "c:in"]), (Branch, ["c:out"])],
)
def test_means_where_several_layers_read_a_unit(
    network: type[nn.Module], sites: list[str], log_alpha: float
) -> None:
    """One of them may be left without an input, and then reads all: up to 8,192 states."""
    gated = hc.attach_gates(network(), torch.randn(2, 3, 2, 2), sites=sites)
    nn.init.normal_(gated.gates.log_alpha, log_alpha)
    states, weights = states_of(gated)
    mean = weights @ torch.vmap(gated.ledger.cost)(states)
    assert expected(gated)[:2] == pytest.approx(mean[:2].tolist(), rel=0.01)
    assert expected(gated)[2] == pytest.approx(mean[2].item(), rel=0.02)


@pytest.mark.parametrize("log_alpha", [0.5, -2.0])
@pytest.mark.parametrize(
    "sites",
    [["2:in", "4:in", "4:out"], ["0:out", "2:out", "4:out"], ["0:in", "0:out", "2:in", "2:out"]],
)
def test_means_where_outputs_and_inputs_are_gated(sites: list[str], log_alpha: float) -> None:
    """The units that a layer without outputs removes do not make that more likely."""
    layers = nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 4), sites=sites)
    nn.init.normal_(gated.gates.log_alpha, log_alpha)
    states, weights = states_of(gated)
    mean = weights @ torch.vmap(gated.ledger.cost)(states)
    assert expected(gated)[:2] == pytest.approx(mean[:2].tolist(), rel=1e-12)
    assert expected(gated)[2] == pytest.approx(mean[2].item(), rel=0.02)


def test_units_that_are_not_gated_stay() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4), exclude="0")
    gated.gates.log_alpha.data.fill_(-90.0)
    assert delivered(gated) == counted(gated)
    assert gated.delivered("params") > 5 * 6


def test_single_weights_save_only_their_group_size() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4), sites=["2:each"])
    gated.gates.log_alpha.data.view(-1, 6)[0] = -90.0  # every unit is still read
    assert expected(gated) == gated.ledger.dense.tolist() == delivered(gated) == counted(gated)
    left = gated.units_left()[0]
    assert gated.delivered("group_size").item() == left == len(gated.gates.log_alpha) - 6
    with pytest.raises(ArgumentError, match="100% are not gated"):
        hc.Budget(gated, params=0.9, by="gates")


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("network", "sites"),
    [
        (Joined, ["a:each", "c:each", "d:each", "fc:in"]),
        (Joined, ["c:in", "d:each"]),
        (Apart, ["a:out", "b:each", "c:each"]),
        (Apart, ["b:each", "c:in", "d:each"]),
    ],
)
def test_a_unit_is_removed_with_its_last_single_weight(
    network: type[nn.Module], sites: list[str]
) -> None:
    assert_drawn_states_cost_what_is_counted(network, sites)


def test_single_weights_of_a_layer_with_one_output() -> None:
    layers = nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 3), sites=["2:each"])
    for log_alpha in ([9.0, 9.0], [-9.0, 9.0], [9.0, -9.0]):
        gated.gates.log_alpha.data.copy_(torch.tensor(log_alpha))
        assert delivered(gated) == counted(gated)


def test_a_layer_with_one_input_selects_nothing() -> None:
    layers = nn.BatchNorm1d(1), nn.Linear(1, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 1), sites=["1:in"])
    for log_alpha in (-9.0, 0.0, 0.3, 9.0):
        gated.gates.log_alpha.data.fill_(log_alpha)
        assert expected(gated) == gated.ledger.dense.tolist()


def test_group_sizes_are_the_paper_s(lenet: hc.GatedModel) -> None:
    penalty = hc.L0Penalty(lenet, lam=1.0)
    assert lenet.expected("group_size").item() == pytest.approx(penalty().item(), rel=1e-5)
    assert lenet.delivered("group_size").item() == 20 * 26 + 50 * 501 + 800 * 500 + 500 * 10


def test_gradients_equal_finite_differences(lenet: hc.GatedModel) -> None:
    p = torch.rand(len(lenet.gates.log_alpha), dtype=torch.float64, requires_grad=True)
    total = lenet.ledger.mean(p)
    for kind in range(len(KINDS)):
        (slope,) = torch.autograd.grad(total[kind], p, retain_graph=True)
        for gate in (3, 25, 300, 1000):
            step = torch.zeros_like(p)
            step[gate] = 1e-4
            with torch.no_grad():
                both = lenet.ledger.mean(p + step) - lenet.ledger.mean(p - step)
            assert slope[gate].item() == pytest.approx(both[kind].item() / 2e-4, rel=1e-5, abs=1e-6)


def test_gradients_are_finite_at_the_ends(lenet: hc.GatedModel) -> None:
    for value in (0.0, 1.0):
        p = torch.full_like(lenet.gates.log_alpha, value, requires_grad=True)
        for total in (lenet.ledger.cost(p), lenet.ledger.mean(p)):
            (slope,) = torch.autograd.grad(total.sum(), p)
            assert slope.isfinite().all()


def test_costs_are_float64_for_any_model() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4), droprate=0.5)
    before = expected(gated)
    gated = gated.to(torch.bfloat16)
    assert gated.expected("macs").dtype == gated.delivered("macs").dtype == torch.float64
    assert expected(gated)[:2] == before[:2]


def test_copies_have_the_costs_and_state_dicts_do_not(lenet: hc.GatedModel) -> None:
    assert not any("ledger" in key for key in lenet.state_dict())
    assert expected(copy.deepcopy(lenet)) == expected(lenet)
    gated = hc.attach_gates(dense(), torch.randn(3, 4), droprate=0.5)
    before = expected(gated)
    assert expected(pickle.loads(pickle.dumps(gated))) == before


def test_costs_move_with_the_model() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    _ = gated.ledger
    assert gated.to("meta").expected("macs").is_meta
    assert gated.delivered("macs").is_meta


@pytest.mark.parametrize("sites", ["auto", ["b:in", "c:in"], ["a:out", "b:each", "c:in"]])
def test_costs_do_not_synchronize_with_the_device(sites: str | list[str]) -> None:
    """Tensors without numbers do: a CUDA graph can be captured."""
    gated = hc.attach_gates(Apart(), torch.randn(2, 3, 2, 2), sites=sites)
    ledger = gated.ledger.to(torch.device("meta"))
    gates = torch.empty(len(gated.gates.log_alpha), device="meta")
    assert ledger.cost(gates).shape == ledger.mean(gates).shape == (len(KINDS),)


@pytest.mark.unwatched
def test_costs_compile_into_one_graph(lenet: hc.GatedModel) -> None:
    function = torch.compile(lenet.expected, fullgraph=True, backend="aot_eager")
    assert function("macs").item() == pytest.approx(lenet.expected("macs").item(), rel=1e-14)
    function = torch.compile(lenet.delivered, fullgraph=True, backend="aot_eager")
    assert function("macs").item() == lenet.delivered("macs").item()


def test_costs_can_be_computed_before_compiling() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    with pytest.raises(Exception, match="once before compiling") as caught:
        torch.compile(gated.expected, fullgraph=True, backend="eager")("macs")
    assert caught.type is GateError or "GateError" in str(caught.value)


def test_an_unknown_cost_is_refused() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    with pytest.raises(ArgumentError, match="cost='flops' is not known; use one of 'params'"):
        gated.expected("flops")


def test_the_summary_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    nn.init.constant_(gated.gates.log_alpha, -2.0)
    gated.summary()
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("params: ")]
    share = gated.expected("params").item() / gated.ledger.dense[0].item()
    assert line.startswith(f"params: {share:.1%} expected, 100.0% delivered, of ")


def test_removed_gates_count_as_closed() -> None:
    gated = hc.attach_gates(LeNet5(), torch.zeros(1, 1, 28, 28), sites=PAPER)
    probability = torch.rand(1370, dtype=torch.float64)
    kept = torch.arange(0, 1370, 3)
    remaining = gated.ledger.for_remaining(kept, 1370)
    among = torch.zeros(1370, dtype=torch.float64).index_copy(0, kept, probability[kept])
    assert torch.equal(remaining.cost(probability[kept]), gated.ledger.cost(among))
    assert remaining.to(torch.device("cpu")).remaining_positions is not None


@pytest.mark.parametrize(
    "values",
    [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0, 0.3], [1e-18, 1e-18], [0.2, 0.5, 0.9, 1.0], [0.3] * 40],
)
def test_any_probability_is_exact_and_has_gradients_at_0_and_1(values: list[float]) -> None:
    lacking = [1 - Fraction(value) for value in values]
    at = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    found = _any_probability(at)
    assert found.item() == pytest.approx(float(1 - math.prod(lacking)), rel=1e-14, abs=0)
    (slopes,) = torch.autograd.grad(found, at)
    others = [math.prod(lacking[:k] + lacking[k + 1 :]) for k in range(len(values))]
    assert slopes.tolist() == pytest.approx([float(own) for own in others], rel=1e-12, abs=1e-15)
