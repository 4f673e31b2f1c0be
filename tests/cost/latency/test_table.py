"""Predicted latency: exact if time is a sum of sizes, and useful for real times."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.cost.latency import clock
from hardconcrete.cost.latency import table as latency
from hardconcrete.cost.latency.clock import FORWARD, MODULE_CALL, Grid, cache_file, read_cache
from hardconcrete.cost.latency.table import Surface, _forward_call, _surface
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.models import LeNet5, ResNet
from tests.cost import sizes
from tests.zoo import GATED, Entry, gated_network

PAPER = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 20, 3), nn.Conv2d(20, 20, 3, groups=20)
        self.c = nn.Conv2d(20, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu()).mean((2, 3))


NETWORKS = {
    "lenet": (LeNet5, (1, 28, 28), "auto"),
    "lenet with the paper's gates": (LeNet5, (1, 28, 28), PAPER),
    "resnet": (lambda: ResNet(8), (3, 32, 32), "auto"),
    "depthwise": (Depthwise, (3, 8, 8), "auto"),
}


@pytest.fixture
def by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_call_times", sizes.times)
    monkeypatch.setattr(latency, "FORWARD_EXPONENT", 0.0)


def network(name: str, examples: int = 2) -> hc.GatedModel:
    torch.manual_seed(0)
    make, shape, sites = NETWORKS[name]
    return hc.attach_gates(make(), torch.randn(examples, *shape), sites=sites)


def decide(gated: hc.GatedModel, seed: int) -> None:
    """Gates at 0 and 1, other widths for each group."""
    torch.manual_seed(seed)
    for group in gated.groups:
        shut = torch.rand(group.units) < 0.8 * torch.rand(())
        gated.gates.log_alpha.data[group.slice] = torch.where(shut, -90.0, 90.0)


def of_the_compacted(gated: hc.GatedModel, batch: int) -> float:
    return sizes.of_the_compacted(gated, hc.compact(gated, form="module"), batch)


@pytest.mark.unwatched
@pytest.mark.usefixtures("by_size")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_delivered_widths_are_those_of_the_compacted_model(name: str, batch: int) -> None:
    gated = network(name)
    table = gated.measure_latency(batch=batch)
    assert table.dense == pytest.approx(of_the_compacted(_all_open(gated), batch))
    for seed in range(2):
        decide(gated, seed)
        expected = of_the_compacted(gated, batch)
        assert gated.delivered("latency_ms").item() == pytest.approx(expected, rel=1e-12)


ROUGH = {
    "attention_einsum_weights", "attention_grouped", "crelu", "cross_stage", "decoder",
    "depthwise_multiplier", "glu", "group_norm", "grouped", "grouped_transposed", "inception",
    "literal_view", "maxout", "multihead", "pixel_shuffle", "res2net", "resnext", "shuffle_v1",
    "shuffle_v2", "torch_decoder", "torch_encoder", "torch_stack",
}  # fmt: skip
"""Operators with sizes among their arguments, groups, more than two widths, or another forward."""


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.usefixtures("by_size")
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_the_widths_of_the_zoo(entry: Entry) -> None:
    gated = gated_network(entry)
    for seed in range(2):
        decide(gated, seed)
        for group in gated.groups:
            gated.gates.log_alpha.data[group.start] = 90.0
        expected = sizes.of_the_compacted(gated, hc.compact(gated))
        found = gated.delivered("latency_ms").item()
        assert found == pytest.approx(expected, rel=0.15 if entry.name in ROUGH else 1e-12)


def _all_open(gated: hc.GatedModel) -> hc.GatedModel:
    nn.init.constant_(gated.gates.log_alpha, 90.0)
    return gated


@pytest.mark.usefixtures("by_size")
def test_expected_latency_is_that_of_expected_widths() -> None:
    """Of time that is a sum of sizes it is the mean over all patterns, and so is its gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    gated = hc.attach_gates(model, torch.zeros(2, 3))
    nn.init.normal_(gated.gates.log_alpha)
    gated.gates.log_alpha.data[[0, 4]] = 90.0  # no group is left with nothing
    table = gated.measure_latency()

    def mean() -> float:
        p = gated.gates.distribution().open_probability.detach().double()
        states = itertools.product((0.0, 1.0), repeat=7)
        total = 0.0
        for state in states:
            z = torch.tensor(state, dtype=torch.float64)
            weight = torch.where(z == 1, p, 1 - p).prod().item()
            total += weight * table._total(table.fine, table.ledger.sizes(z)).item()
        return total

    found = gated.expected("latency_ms")
    assert found.item() == pytest.approx(mean(), rel=1e-9)
    (slopes,) = torch.autograd.grad(found, gated.gates.log_alpha)
    assert (slopes[[1, 2, 3, 5, 6]] > 0).all()
    for k in (1, 2, 3, 5, 6):
        ends = []
        for step in (0.01, -0.01):
            gated.gates.log_alpha.data[k] += step
            ends.append(mean())
            gated.gates.log_alpha.data[k] -= step
        assert slopes[k].item() == pytest.approx((ends[0] - ends[1]) / 0.02, rel=1e-3)


def test_a_surface_is_bilinear_between_knots_and_beyond() -> None:
    grid = Grid(((1, 4, 8), (1, 2)), tuple(3.0 * a * b + a for a in (1, 4, 8) for b in (1, 2)))
    constant = Grid((), (7.0,))
    surface: Surface = _surface([((0, 1), grid, False), ((), constant, False)], smooth=False)
    for a, b in ((1.0, 1.0), (2.5, 1.3), (8.0, 2.0), (0.0, 1.0), (6.0, 0.5)):
        found = surface(torch.tensor([a, b], dtype=torch.float64))
        assert found.tolist() == pytest.approx([3 * a * b + a, 7.0])


def test_delivered_latency_has_steps_and_expected_latency_is_smooth() -> None:
    """A kernel that takes 16 channels at a time, and is fast when they fill it."""
    grid = Grid(((1, 15, 16, 17, 31, 32),), (5.0, 5.0, 4.0, 9.0, 9.0, 8.0))
    parts = [((0,), grid, False)]
    fine, smooth = _surface(parts, smooth=False), _surface(parts, smooth=True)
    at = torch.tensor([16.0, 24.0], dtype=torch.float64)
    assert [fine(at[k:]).item() for k in (0, 1)] == [4.0, 9.0]
    assert [smooth(at[k:]).item() for k in (0, 1)] == [5.0, 6.5]


@pytest.mark.usefixtures("by_size")
def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = network("lenet")
    first = gated.delivered("latency_ms")
    assert gated.latency is gated.latency

    def fail(operations: list, *_: object) -> dict[str, Grid]:
        raise AssertionError(f"timed again: {len(operations)}")

    monkeypatch.setattr(latency, "time_grids", fail)
    assert copy.deepcopy(gated).delivered("latency_ms") == first
    assert network("lenet").delivered("latency_ms") == first  # from the cache
    with pytest.raises(AssertionError, match="timed again: 10"):
        network("lenet").measure_latency(fresh=True)
    with pytest.raises(AssertionError, match="timed again: 10"):
        network("lenet").measure_latency(batch=5)


@pytest.mark.unwatched
@pytest.mark.parametrize(("took", "scale"), [(1.1**4, 1.1**3), (0.8**4, 0.8**3), (1.0, 1.0)])
def test_the_scale_is_nearer_to_the_forward_than_to_the_sum(
    monkeypatch: pytest.MonkeyPatch, took: float, scale: float
) -> None:

    def time_grids(operations: list, *_: object) -> dict[str, Grid]:
        whole = {FORWARD: Grid((), (took * len(operations),)), MODULE_CALL: Grid((), (0.0,))}
        return whole | {one.name: Grid((), (1.0,)) for one in operations}

    monkeypatch.setattr(latency, "time_grids", time_grids)
    table = network("lenet").measure_latency()
    assert table.scale == pytest.approx(scale)
    assert table.dense == pytest.approx(10 * scale)


def test_the_forward_is_timed_on_random_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two examples repeated 32 times take less time than 64, because of branch prediction."""
    seen: list[Tensor] = []

    def time_grids(operations: list, forward: Any, *_: object) -> dict[str, Grid]:
        seen.extend(forward.args)
        return {name: Grid((), (1.0,)) for name in (FORWARD, MODULE_CALL)} | {
            one.name: Grid((), (1.0,)) for one in operations
        }

    monkeypatch.setattr(latency, "time_grids", time_grids)
    gated = hc.attach_gates(LeNet5(), 3 + 2 * torch.randn(2, 1, 28, 28))
    gated.measure_latency(batch=64)
    (images,) = seen
    assert images.shape == (64, 1, 28, 28)
    assert len(torch.unique(images)) > 0.99 * images.numel()
    assert images.mean().item() == pytest.approx(3, abs=0.3)
    assert images.std().item() == pytest.approx(2, abs=0.3)


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    file = cache_file(torch.device("cpu"))
    assert tmp_path in file.parents
    file.parent.mkdir(parents=True)
    file.write_text('{"relu')
    layers = nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.zeros(1, 4))
    gated.measure_latency(repeats=2)
    assert gated.expected("latency_ms") > 0
    assert len(read_cache(file)) == 1


@pytest.mark.unwatched
def test_real_times_fall_with_the_widths() -> None:
    """The smaller layers have a twentieth of the work, more than any noise."""
    layers = nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 32))
    table = gated.measure_latency(batch=256, repeats=7)
    assert str(table).startswith("5 operators at batch 256 on ")
    dense = table.dense
    for group in gated.groups:
        gated.gates.log_alpha.data[group.slice] = -90.0
        gated.gates.log_alpha.data[group.slice][:100] = 90.0
    assert gated.delivered("latency_ms") < 0.5 * dense
    assert gated.expected("latency_ms") < 0.5 * dense


class Odd(nn.Module):
    """It joins three widths, and has an operator that needs numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, n) for n in (5, 6, 7))
        self.head, self.square = nn.Linear(18, 3), nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([part(x).relu() for part in self.parts], 1)
        return self.head(joined) @ torch.linalg.cholesky(self.square)


def test_untimed_operators_are_named_and_many_widths_count_linearly() -> None:
    gated = _all_open(hc.attach_gates(Odd(), torch.zeros(2, 4)))
    table = gated.measure_latency(repeats=3)
    assert table.untimed == ("aten.linalg_cholesky.default",)
    assert str(table).endswith("; without aten.linalg_cholesky.default")
    (slopes,) = torch.autograd.grad(gated.expected("latency_ms"), gated.gates.log_alpha)
    assert slopes.isfinite().all()


def test_refusals() -> None:
    gated = network("depthwise")
    with pytest.raises(ArgumentError, match="batch=0 must be a whole number, at least 1"):
        gated.measure_latency(batch=0)
    with pytest.raises(ArgumentError, match="repeats=1 must be a whole number, at least 2"):
        gated.measure_latency(repeats=1)
    with pytest.raises(ArgumentError, match="'latency_ms'"):
        gated.expected("latency")


@pytest.mark.parametrize("images", [torch.zeros(2, 1, 28, 28), torch.ones(2, 1, 28, 28)])
def test_blank_examples_are_varied_without_touching_the_random_state(images: Tensor) -> None:
    before = torch.get_rng_state()
    forward = _forward_call(nn.Identity(), ((images,), {}))
    assert forward.args[0].std() > 0.5
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_cannot_be_random_stay() -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.long())

    ids = torch.tensor([[0.0, 4.0], [4.0, 0.0]]).repeat(20, 1)
    assert torch.equal(_forward_call(Ids(), ((ids,), {})).args[0], ids)
