"""Whole branches: which groups may lose all units, and what the model is without them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.units.branches import groups_that_can_go
from tests.exactness import apart, outputs
from tests.zoo import GATED, Entry

BRANCHES = {
    "resnet": {"layers.0.conv1", "layers.1.conv1"},
    "bottleneck": {"block.conv1", "block.conv2"},
    "inception": {"one", "three.0", "three.2"},  # the last tower stays
    "unet": {"down2", "up"},
    "c2f": {"cv1[0:8]", "block.cv1"},
    "llama": {"q", "gate"},
    "attention_grouped": {"q"},
    "torch_encoder": {"layer.self_attn", "layer.linear1"},
    "vision_transformer": {"block.attention", "block.fc1"},
    "experts_all": {"experts.0.0", "experts.1.0", "experts.2.0"},
    "lenet": set(),  # a chain: without a layer, its output would be a constant
    "vgg": set(),
    "weight_norm": set(),  # torch divides by zero entries
}
"""What can go, derived by hand: the inside of branches."""

SEVERAL = [entry for entry in GATED if entry.name in BRANCHES]


@pytest.mark.unwatched
@pytest.mark.parametrize("entry", SEVERAL, ids=[entry.name for entry in SEVERAL])
def test_branches_go(entry: Entry) -> None:
    assert closed_together(entry) == BRANCHES[entry.name]


@pytest.mark.slow
@pytest.mark.unwatched
@pytest.mark.parametrize("entry", GATED, ids=[entry.name for entry in GATED])
def test_all_branches_go(entry: Entry) -> None:
    closed_together(entry)


def closed_together(entry: Entry) -> set[str]:
    """The groups that may be empty, after a check of the model without all of them."""
    torch.manual_seed(0)
    gated = hc.attach_gates(entry.build(), *entry.inputs(2), min_units=0)
    empty = {group.name: group for group in gated.groups if group.may_empty}
    with torch.no_grad():
        gated.gates.log_alpha.fill_(9.0)
        for group in empty.values():
            gated.gates.log_alpha[group.slice] = -9.0
    if empty:
        small = hc.compact(gated)
        kept = hc.CompactionPlan.of(small).groups
        assert not any(kept[name].kept for name in empty)
        some = entry.inputs(3)
        assert apart(outputs(gated.eval(), some), outputs(small.eval(), some)) <= 1e-5
        count = hc.count(small, *entry.inputs(2))
        assert (gated.delivered("params"), gated.delivered("macs")) == (count.params, count.macs)
    return set(empty)


def test_a_branch_goes_after_shrink_and_through_a_file(tmp_path: Path) -> None:
    """Shrinking keeps a closed unit of it; compaction, its cost and its file have none."""
    (entry,) = (entry for entry in GATED if entry.name == "torch_encoder")
    torch.manual_seed(0)
    gated = hc.attach_gates(entry.build(), *entry.inputs(2), min_units=0)
    gated.gates.set_open(torch.zeros(gated.gates.count, dtype=torch.bool))
    some = entry.inputs(3)
    expected = outputs(gated.eval(), some)
    hc.shrink(gated, torch.optim.SGD(gated.parameters(), lr=0.1))
    assert [group.units for group in gated.groups] == [1, 1]
    small = hc.compact(gated)
    assert gated.delivered("params") == hc.count(small, *entry.inputs(2)).params
    hc.save(tmp_path / "small.safetensors", small)
    loaded = hc.load(tmp_path / "small.safetensors", entry.build()).eval()
    for model in (gated.eval(), small.eval(), loaded):
        assert apart(expected, outputs(model, some)) <= 1e-5


class Blocks(nn.Module):
    """Two residual blocks, of which the second adds next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.up = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))
        self.down[1].weight.data *= 1e-4

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return self.head(x)  # type: ignore[no-any-return]


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2]).square().mean()


def test_prune_drops_a_block_that_does_not_matter() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(64, 6)
    small = hc.prune(model, x[:1], x.split(32), square_loss, macs=0.6, min_units=0, stages=2)
    kept = hc.CompactionPlan.of(small).groups
    assert kept["up.1"].kept == ()
    assert kept["up.0"].kept
    assert hc.count(small, x).macs <= 0.6 * hc.count(model, x).macs
    one = hc.prune(model, x[:1], x.split(32), square_loss, macs=0.6, stages=2)
    assert len(hc.CompactionPlan.of(one).groups["up.1"].kept) == 1


@pytest.mark.parametrize("by", ["importance", "gates"])
def test_a_budget_counts_blocks_that_are_gone(by: str) -> None:
    """A budget below what one unit in each group costs, which min_units=1 refuses."""
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    with pytest.raises(hc.errors.ArgumentError, match="cannot be met"):
        hc.Budget(hc.attach_gates(Blocks(), x[:2], exclude="stem"), macs=0.18, by=by)
    gated = hc.attach_gates(Blocks(), x[:2], exclude="stem", min_units=0)
    budget = hc.Budget(gated, macs=0.18, steps=40, by=by)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        (square_loss(gated, x) + budget()).backward()
        optimizer.step()
        budget.step()
    small = hc.compact(gated, budget=budget)
    assert hc.count(small, x).macs <= 0.18 * hc.count(Blocks(), x).macs


def test_a_weight_norm_keeps_a_unit() -> None:
    """torch divides by zero, and the process ends, so this is refused before."""
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(hc.errors.CompactionError, match="0: torch cannot normalise a tensor"):
        hc.compact(model, torch.zeros(2, 4), keep={"0": []}, min_units=0)


def test_named_sites_keep_a_unit() -> None:
    gated = hc.attach_gates(Blocks(), torch.randn(2, 6), sites=["stem:out"], min_units=0)
    assert not any(group.may_empty for group in gated.groups)


def test_only_one_or_none() -> None:
    with pytest.raises(hc.errors.ArgumentError, match="min_units=2: a group keeps one unit"):
        hc.attach_gates(Blocks(), torch.randn(2, 6), min_units=2)


def test_two_outputs_keep_their_ways() -> None:
    """A branch that only one output uses is its only way from the inputs."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.side = nn.Linear(4, 5), nn.Linear(4, 6)
            self.one, self.two = nn.Linear(5, 2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(F.relu(self.first(x))), self.two(F.relu(self.side(x)))

    assert groups_that_can_go(hc.find_groups(Two(), torch.zeros(2, 4))) == frozenset()


def test_a_flattened_branch_goes_in_the_graph_form() -> None:
    """Without entries a size of -1 is ambiguous; the graph gets the size itself."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            inner = F.relu(self.up(x)).view(-1, 12)
            return self.head(x + self.down(inner).view(x.shape))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    gated = hc.attach_gates(Flattened(), torch.randn(2, 3, 6), min_units=0, exclude="stem")
    gated.gates.set_open(torch.zeros(12, dtype=torch.bool))
    small = hc.compact(gated)
    assert hc.CompactionPlan.of(small).form == "graph"
    x = torch.randn(5, 3, 6)
    torch.testing.assert_close(small(x), gated.eval()(x))
