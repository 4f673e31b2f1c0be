"""From a budget to a mask: never above it, and nothing is closed that would still fit."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.cost.ledger import KINDS
from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.objective.projection import Projection, project
from hardconcrete_paper.models import LeNet5, WideResNet
from tests.compaction.networks import dense
from tests.exactness import apart, at_random, outputs
from tests.zoo import GATED, Entry, gated_network

ABOVE = "the training ended above its budget"
pytestmark = pytest.mark.filterwarnings(f"ignore:{ABOVE}")


def projected(gated: hc.GatedModel, budget: hc.Budget, round_to: int = 1) -> torch.Tensor:
    return project(gated, budget.constraints, round_to=round_to).values


def shares(gated: hc.GatedModel, is_open: torch.Tensor) -> torch.Tensor:
    return gated.ledger.cost(is_open) / gated.ledger.dense


def assert_maximal(gated: hc.GatedModel, values: torch.Tensor, kind: int, limit: float) -> None:
    """No unit that is shut would still fit; one of each group is tried, for all cost the same."""
    is_open = values > 0
    assert shares(gated, is_open)[kind] <= limit * (1 + 1e-9)
    for group in gated.groups:
        shut = (~is_open[group.slice]).nonzero().flatten()
        if len(shut):
            more = is_open.clone()
            more[group.start + shut[0]] = True
            assert shares(gated, more)[kind] > limit, group.name


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_the_zoo_within_budgets(entry: Entry) -> None:
    """Between what must stay and everything, by parameters, MACs and bytes in turn."""
    gated = at_random(gated_network(entry))
    gated.freeze_gates()
    least = shares(gated, torch.zeros_like(gated.gates.log_alpha))
    for kind, part in enumerate((0.1, 0.4, 0.8)):
        limit = float(least[kind] + part * (1 - least[kind]))
        budget = hc.Budget(gated, **{KINDS[kind]: limit}, by="gates")  # type: ignore[arg-type]
        assert_maximal(gated, projected(gated, budget, 1), kind, limit)
    small = hc.compact(gated, budget=budget)
    found = hc.count(small, *gated.example)
    whole = hc.count(entry.build(), *gated.example)
    assert found.weight_bytes <= limit * whole.weight_bytes * (1 + 1e-9)
    three = entry.inputs(3)
    with gated.gates.holding(None, projected(gated, budget, 1)):
        expected = outputs(gated.eval(), three)
    assert apart(expected, outputs(small.eval(), three)) < 1e-5


@pytest.fixture
def lenet() -> hc.GatedModel:
    torch.manual_seed(0)
    gated = hc.attach_gates(LeNet5(), torch.rand(2, 1, 28, 28))
    nn.init.normal_(gated.gates.log_alpha, -1.0, 3.0)
    return gated


@pytest.mark.parametrize("limit", [0.02, 0.1, 0.5, 0.9])
def test_lenet(lenet: hc.GatedModel, limit: float) -> None:
    budget = hc.Budget(lenet, macs=limit, params=0.7, by="gates")
    small = hc.compact(lenet, budget=budget)
    found = hc.count(small, lenet.example[0])
    assert found.macs <= limit * 2 * 2_293_000
    assert found.params <= 0.7 * 431_080


def test_the_least_certain_go_first_and_the_likeliest_come_back() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    locations = torch.tensor([5.0, 4, 3, 2, 1, 0, 5, 4, -3, -4, -5])
    gated.gates.log_alpha.data.copy_(locations)
    values = projected(gated, hc.Budget(gated, units=4, by="gates"), 1)
    assert (values > 0).nonzero().flatten().tolist() == [0, 1, 6, 7]
    values = projected(gated, hc.Budget(gated, units=9, by="gates"), 1)
    assert (values > 0).nonzero().flatten().tolist() == [*range(8), 8]
    mean = gated.gates.distribution().mean
    assert values[8] == mean[8] > 0
    assert torch.equal(values[:8], gated.gates.readout()[:8])


def test_a_group_that_is_shut_altogether_comes_back_last() -> None:
    """Though its units are likelier to be open than those that are shut elsewhere."""
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    gated.gates.log_alpha.data.copy_(torch.tensor([5.0, 5, 5, 5, -9, -9] + [-3.0] * 5))
    fewer = projected(
        gated, hc.Budget(gated, units=6, by="gates"), 1
    )  # one is kept anyway, and is opened
    assert (fewer > 0).tolist() == [True] * 5 + [False, True] + [False] * 4
    values = projected(gated, hc.Budget(gated, units=8, by="gates"), 1)
    assert (values > 0).tolist() == [True] * 8 + [False] * 3
    assert torch.equal(values[6:8], gated.gates.distribution().mean[6:8])
    whole = projected(
        gated, hc.Budget(gated, units=10, by="gates"), 4
    )  # blocks of four, and four, and one
    assert (whole > 0).tolist() == [True] * 10 + [False]
    assert hc.compact(gated, round_to=2)[4].in_features == 2  # without a budget it stays out


@pytest.mark.parametrize("round_to", [4, 8])
def test_widths_in_blocks(lenet: hc.GatedModel, round_to: int) -> None:
    left = lenet.units_left()
    small = hc.compact(lenet, round_to=round_to)
    widths = small.conv1.out_channels, small.conv2.out_channels, small.fc1.out_features
    for width, before, units in zip(widths, left, (20, 50, 500), strict=True):
        assert width % round_to == 0 or width == units
        assert before <= width < before + round_to
    budget = hc.Budget(lenet, macs=0.2, by="gates")
    small = hc.compact(lenet, round_to=round_to, budget=budget)
    widths = small.conv1.out_channels, small.conv2.out_channels, small.fc1.out_features
    assert all(w % round_to == 0 or w == n for w, n in zip(widths, (20, 50, 500), strict=True))
    assert hc.count(small, lenet.example[0]).macs <= 0.2 * 2 * 2_293_000


@pytest.mark.unwatched
@pytest.mark.parametrize("limit", [None, 0.7, 0.5])
def test_a_branch_that_is_shut_keeps_a_block(limit: float | None) -> None:
    """One map would be no multiple, and what libraries have for it is slow."""
    images = torch.randn(2, 3, 8, 8)
    gated = hc.attach_gates(WideResNet(16, 1), images, include="*.conv1").eval()
    nn.init.normal_(gated.gates.log_alpha, 0.0, 4.0)
    gated.gates.log_alpha.data[gated.groups[1].slice] = -20.0
    budget = limit and hc.Budget(gated, macs=limit, by="gates")
    small = hc.compact(gated, budget=budget, round_to=8)
    widths = [block.conv1.out_channels for stage in small.stages for block in stage]
    assert all(width % 8 == 0 and width > 0 for width in widths)
    counted = hc.count(small, images).macs
    assert counted <= (limit or 1.0) * gated.ledger.dense[1]
    assert widths[1] == 8
    assert small.stages[0][1].conv2.weight.any() == (limit is not None)  # a budget opens it


def test_the_gated_model_stays_as_it_is(lenet: hc.GatedModel) -> None:
    before = {key: value.clone() for key, value in lenet.state_dict().items()}
    hc.compact(lenet, budget=hc.Budget(lenet, macs=0.1, by="gates"), round_to=2)
    assert all(torch.equal(before[key], value) for key, value in lenet.state_dict().items())


@pytest.mark.parametrize("limit", [0.1, 0.15, 0.2])
def test_blocks_of_nested_gates_stay_within_the_budget(limit: float) -> None:
    """A map has its own gate and those of its four places: neither alone says that it is alive."""
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 20), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(20, 3))
    gated = hc.attach_gates(model, torch.randn(2, 1, 4, 4), sites=["0:out", "3:in"])
    nn.init.constant_(gated.gates.log_alpha, -5.0)
    gated.gates.log_alpha.data[:16].copy_(torch.linspace(5.0, 1.0, 16))
    gated.gates.log_alpha.data[16:].copy_(torch.linspace(1.0, 5.0, 64))
    small = hc.compact(gated, budget=hc.Budget(gated, macs=limit, by="gates"), round_to=8)
    assert hc.count(small, gated.example[0]).macs <= limit * gated.ledger.dense[1]


def test_single_weights_are_left_alone() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4), sites=["0:out", "2:each"])
    nn.init.normal_(gated.gates.log_alpha)
    values = projected(gated, hc.Budget(gated, params=0.9, by="gates"), 1)
    assert torch.equal(values[6:], gated.gates.readout()[6:].detach())


def test_the_gates_of_the_paper_nest() -> None:
    sites = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]
    gated = hc.attach_gates(LeNet5(), torch.rand(2, 1, 28, 28), sites=sites)
    nn.init.normal_(gated.gates.log_alpha, -1.0, 3.0)
    small = hc.compact(gated, budget=hc.Budget(gated, macs=0.1, by="gates"))
    assert 0.09 * 2 * 2_293_000 < hc.count(small, gated.example[0]).macs <= 0.1 * 2 * 2_293_000


def test_refused(lenet: hc.GatedModel) -> None:
    with pytest.raises(ArgumentError, match="round_to=0 must be a whole number, at least 1"):
        hc.compact(lenet, round_to=0)
    with pytest.raises(ArgumentError, match="each group keeps a block: leave min_units=1"):
        hc.compact(lenet, round_to=2, min_units=3)
    with pytest.raises(CompactionError, match="one block of each group already exceeds it"):
        hc.compact(lenet, round_to=16, budget=hc.Budget(lenet, macs=0.05, by="gates"))
    other = hc.attach_gates(dense(), torch.randn(3, 4))
    with pytest.raises(ArgumentError, match="Budget of this model"):
        hc.compact(lenet, budget=hc.Budget(other, macs=0.9, by="gates"))
    with pytest.raises(ArgumentError, match="Budget of this model"):
        hc.compact(lenet, budget=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("part", "width"), [(0.9, 40), (0.5, 24), (0.25, 8)])
def test_gates_that_are_equally_certain_still_fill_blocks(part: float, width: int) -> None:
    model = nn.Sequential(nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, 4))
    gated = hc.attach_gates(model, torch.zeros(1, 16))
    nn.init.constant_(gated.gates.log_alpha, 30.0)
    small = hc.compact(gated, budget=hc.Budget(gated, macs=part, by="gates"), round_to=8)
    assert small[0].out_features == width


def test_among_gates_whose_chance_is_one_log_alpha_decides() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    gated = hc.attach_gates(model, torch.zeros(1, 4))
    gated.gates.log_alpha.data.copy_(torch.tensor([40.0, 90.0, 50.0, 80.0, 60.0, 70.0]))
    small = hc.compact(gated, budget=hc.Budget(gated, macs=0.5, by="gates"))
    assert hc.CompactionPlan.of(small).groups["0"].kept == (1, 3, 5)


def test_reading_everything_can_be_cheaper_than_choosing() -> None:
    """The indices of chosen inputs take memory, too: more units then need fewer bytes."""
    model = nn.Sequential(nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 2))
    gated = hc.attach_gates(model, torch.zeros(1, 100), sites=["0:in", "2:in"])
    nn.init.constant_(gated.gates.log_alpha, 9.0)
    gated.gates.log_alpha.data[:3] = -9.0
    small = hc.compact(gated, budget=hc.Budget(gated, weight_bytes=1.0, by="gates"))
    assert hc.count(small, torch.zeros(1, 100)).params == 1032


@pytest.mark.parametrize("log_alpha", [-9.0, -20.0, -40.0, -200.0])
def test_units_shut_for_long_come_back(log_alpha: float) -> None:
    """Their mean is zero in floating point, but not their place in a width."""
    model = nn.Sequential(nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, 4))
    gated = hc.attach_gates(model, torch.randn(3, 16))
    gated.gates.log_alpha.data.copy_(torch.tensor([5.0] * 11 + [log_alpha] * 39))
    assert hc.compact(gated, round_to=8)[0].out_features == 16
    budget = hc.Budget(gated, macs=0.8, by="gates")
    assert hc.compact(gated, budget=budget)[0].out_features == 40
    assert hc.compact(gated, budget=budget, round_to=16)[0].out_features == 32


@pytest.mark.parametrize("where", [{}, {"sites": ["0:out"]}])
@pytest.mark.parametrize("log_alpha", [-20.0, 0.1, 3.0])
def test_a_last_short_block_comes_after_all_others(log_alpha: float, where: Any) -> None:
    """Three blocks of 16 and one of 2, of which 40 units would fit: 34 are no multiple."""
    model = nn.Sequential(nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, 4))
    gated = hc.attach_gates(model, torch.randn(3, 16), **where)
    nn.init.constant_(gated.gates.log_alpha, log_alpha)
    gated.gates.log_alpha.data[:3] = 5.0
    small = hc.compact(gated, budget=hc.Budget(gated, macs=0.8, by="gates"), round_to=16)
    assert small[0].out_features == 32


def test_one_multiply_add_too_many_of_billions_is_too_many() -> None:
    layers = nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1)
    images = torch.zeros(1, 8, 512, 512)
    gated = hc.attach_gates(nn.Sequential(*layers), images)
    nn.init.constant_(gated.gates.log_alpha, 5.0)
    dense = int(gated.ledger.dense[1])
    assert dense > 10**9
    small = hc.compact(gated, budget=hc.Budget(gated, macs=dense - 1, by="gates"))
    assert hc.count(small, images).macs < dense


def test_a_training_that_ended_above_its_budget_is_said() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 2)), torch.zeros(1, 4))
    nn.init.constant_(gated.gates.log_alpha, 5.0)
    words = rf"{ABOVE}, with 100.0% of the MACs delivered and .* of 50.0%: .* hc.check_run"
    with pytest.warns(hc.HardConcreteWarning, match=words):
        hc.compact(gated, budget=hc.Budget(gated, macs=0.5, by="gates"))
    gated.gates.log_alpha.data[:25] = -5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hc.compact(gated, budget=hc.Budget(gated, macs=0.5, by="gates"))


def test_a_budget_that_one_block_of_each_group_exceeds() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 2)), torch.zeros(1, 4))
    budget = hc.Budget(gated, macs=0.1, by="gates")
    with pytest.raises(CompactionError, match=r"raise the budget, or lower round_to$"):
        hc.compact(gated, budget=budget, round_to=16)


def test_what_the_budget_accepted_is_met() -> None:
    """With other gates than the likeliest of each site where these alone cost too much."""
    layers = nn.BatchNorm1d(3), nn.Linear(3, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 3), sites=["1:out", "1:in"])
    gated.gates.log_alpha.data.copy_(torch.tensor([-9.0, -8.0, 3.0, 2.0, 1.0]))
    budget = hc.Budget(
        gated, macs=2 * 2, by="gates"
    )  # with all outputs shut, all three inputs are read
    values = projected(gated, budget, 1)
    assert gated.ledger.cost(values > 0)[1] <= 4
    for gate in (values == 0).nonzero().flatten():
        more = values > 0
        more[gate] = True
        assert gated.ledger.cost(more)[1] > 4
    assert hc.count(hc.compact(gated, budget=budget), torch.randn(2, 3)).macs <= 4


def test_everything_fits_of_groups_without_a_limit() -> None:
    layers = nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 4))
    gated.gates.log_alpha.data.copy_(torch.where(torch.arange(40) % 5 == 0, 5.0, -5.0))
    small = hc.compact(gated, budget=hc.Budget(gated, units={"0": 10}, by="gates"))
    assert (small[0].out_features, small[2].out_features) == (10, 20)


def test_a_collapse_far_below_a_budget_is_said() -> None:
    layers = nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(2, 4))
    budget = hc.Budget(gated, macs=0.5, by="gates")
    gated.gates.log_alpha.data.copy_(torch.where(torch.arange(40) < 10, 5.0, -5.0))
    words = "with 1.3% of the MACs delivered and .* expected instead of 50.0%, and closed 2 "
    with pytest.warns(hc.HardConcreteWarning, match=words):
        hc.compact(gated, budget=budget)
    both = hc.Budget(gated, units={"0": 10, "2": 10}, by="gates")  # the other one is met
    with pytest.warns(hc.HardConcreteWarning, match="% of the units of 2 delivered .* closed 2 "):
        hc.compact(gated, budget=both)
    gated.gates.log_alpha.data[20] = 5.0  # as small, and nothing has collapsed
    hc.compact(gated, budget=budget)


def test_true_is_no_width() -> None:
    gated = hc.attach_gates(nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
    with pytest.raises(ArgumentError, match="round_to=True"):
        hc.compact(gated, round_to=True)


@pytest.mark.parametrize("by", ["importance", "gates"])
def test_a_budget_projects_to_the_mask_that_compaction_applies(by: str) -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    nn.init.normal_(gated.gates.log_alpha, std=4.0)
    budget = hc.Budget(gated, units=6, by=by)
    mask = budget.project(round_to=2)
    assert mask.gated is gated
    left = [int((values > 0).sum()) for values in gated.by_group(mask.values).values()]
    small = hc.compact(gated, budget=budget, round_to=2)
    assert [small[0].out_features, small[2].out_features] == left
    assert sum(left) <= 6
    copied = copy.deepcopy(gated)
    assert budget.project(copied).gated is copied


def test_anything_that_projects_is_a_budget() -> None:
    class FirstUnits:
        """Keeps the first units of every group."""

        def project(self, gated: Any, **_: Any) -> Projection:
            values = gated.gates.readout().detach()
            for group in gated.groups:
                values[group.slice][2:] = 0.0
            return Projection(gated, values, min_units=1)

    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    small = hc.compact(gated, budget=FirstUnits())
    assert (small[0].out_features, small[2].out_features) == (2, 2)


@pytest.mark.parametrize("by", ["gates", "importance"])
def test_uniform_budgets(by: str) -> None:
    """The same layers keep equally many units, in training and in the small model."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)]
    gated, x = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 8)), torch.randn(64, 8)
    budget = hc.Budget(gated, macs=0.5, steps=20, by=by, uniform=True)
    optimizer = torch.optim.Adam(gated.parameters(), lr=0.1)
    for _ in range(20):
        loss = (gated(x) - x[:, :2]).square().mean() + budget()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
        if by == "importance":
            first, second = (gated.gates.is_open()[group.slice].sum() for group in gated.groups)
            assert first == second
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hc.HardConcreteWarning)  # so few steps end above the budget
        small = hc.compact(gated, budget=budget)
    first, second = (len(kept.kept) for kept in hc.CompactionPlan.of(small).groups.values())
    assert first == second < 12


def test_uniform_without_a_budget() -> None:
    """Units open until the widths are equal."""
    gated = hc.attach_gates(
        nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)), torch.randn(2, 3)
    )
    with torch.no_grad():
        gated.gates.log_alpha.copy_(torch.tensor([9.0] * 2 + [-9.0] * 4 + [9.0] * 4 + [-9.0] * 2))
    small = hc.compact(gated, uniform=True)
    assert (small[0].out_features, small[1].out_features) == (4, 4)  # type: ignore[index]
