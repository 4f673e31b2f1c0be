"""Masks that users bring: of plain models, and of gated ones."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, SiteError
from hardconcrete_paper.models import LeNet5
from tests.compaction.networks import Joined, Maps, at_random, dense, gap
from tests.exactness import apart, outputs
from tests.zoo import GATED, Entry, gated_network

SOME = GATED[::7]


def random_masks(gated: hc.GatedModel, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for group in gated.groups:
        masks[group.name] = torch.rand(group.units, generator=generator) < 0.6
        masks[group.name][int(torch.randint(group.units, (), generator=generator))] = True
    return masks


@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", SOME, ids=[entry.name for entry in SOME])
def test_plain_models_of_the_zoo(entry: Entry) -> None:
    """A plain model under a mask is the gated one with gates of 0 and 1."""
    gated = gated_network(entry)
    model = copy.deepcopy(hc.remove_gates(copy.deepcopy(gated)))
    masks = random_masks(gated, seed=len(entry.name))
    with torch.no_grad():
        gated.gates.log_alpha.copy_(torch.where(torch.cat([*masks.values()]), 9.0, -9.0))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    args, kwargs = entry.inputs(2)
    state = torch.get_rng_state()
    small = hc.compact(model, args, kwargs, keep=masks)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.state_dict().values()))
    by_gates = hc.compact(gated)
    assert hc.CompactionPlan.of(small) == hc.CompactionPlan.of(by_gates)
    for name, tensor in by_gates.state_dict().items():
        assert torch.equal(small.state_dict()[name], tensor), name
    five = entry.inputs(5)
    assert apart(outputs(gated.eval(), five), outputs(small.eval(), five)) < 1e-5


MASK = [True, False, True, True, False, True]
WAYS: dict[str, Any] = {
    "bools": MASK,
    "tensor of bools": torch.tensor(MASK),
    "array of bools": np.array(MASK),
    "list": [5, 0, 3, 2],
    "tuple": (0, 2, 3, 5),
    "tensor": torch.tensor([0, 2, 3, 5], dtype=torch.int32),
    "array": np.array([0, 2, 3, 5]),
    "unsigned array": np.array([0, 2, 3, 5], dtype=np.uint16),
    "sparse tensor": torch.tensor(MASK).to_sparse(),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_name_units(way: str) -> None:
    model, x = dense(), torch.randn(3, 4)
    small = hc.compact(model, x, keep={"0": WAYS[way]})
    assert hc.CompactionPlan.of(small).groups["0"].kept == (0, 2, 3, 5)
    assert torch.equal(small[0].weight, model[0].weight[[0, 2, 3, 5]])
    assert small[2].out_features == 5  # a group that is not named keeps all


def test_what_is_not_named_keeps_what_its_gates_say() -> None:
    gated = at_random(hc.attach_gates(dense(), torch.randn(3, 4)))
    open_now = tuple((gated.gate_values()["2"] > 0).nonzero().flatten().tolist())
    groups = hc.CompactionPlan.of(hc.compact(gated, keep={"0": [1, 4]})).groups
    assert (groups["0"].kept, groups["2"].kept) == ((1, 4), open_now)


def test_a_unit_that_stays_has_the_value_of_its_gate() -> None:
    """Its mean where the gate is closed."""
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(3, 4))
    gated.gates.log_alpha.data.copy_(torch.tensor([0.0, -3.0, 5.0]))
    small = hc.compact(gated, keep={"0": [0, 1]})
    weight = gated.model[1]._parameters["weight"]  # type: ignore[index, union-attr]
    values = torch.stack([gated.gates.readout()[0], gated.gates.distribution().mean[1]])
    torch.testing.assert_close(small[1].weight, weight[:, :2] * values)  # type: ignore[index]


def test_named_sites_are_groups() -> None:
    x = torch.randn(2, 1, 28, 28)
    gated = hc.attach_gates(LeNet5(), x, sites=["conv1:out", "fc1:in"])
    with torch.no_grad():
        gated.gates.log_alpha.fill_(9.0)
    small = hc.compact(gated, keep={"conv1:out": range(7), "fc1:in": torch.arange(800) < 500})
    assert (small.conv1.out_channels, small.fc1.in_features) == (7, 500)
    with torch.no_grad():
        gated.gates.log_alpha[7:20] = gated.gates.log_alpha[20 + 500 :] = -9.0
    assert gap(gated, small, x) < 1e-5


def test_modes_and_attributes_are_those_of_the_model() -> None:
    model = Maps()
    model.train()
    model.bn.eval()
    small = hc.compact(model, Maps.example(), keep={"conv1": [0, 1, 2]})
    assert (small.training, small.bn.training, type(small)) == (True, False, Maps)
    assert not any(hasattr(module, "ungated") for module in (*small.modules(), *model.modules()))


def test_a_whole_group_can_go_where_that_is_asked_for() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
            self.inner, self.outer = nn.Linear(5, 6), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head(x + self.outer(self.inner(x).relu()))

    model, x = Branch(), torch.randn(3, 4)
    with pytest.raises(ArgumentError, match=r"keep\['inner'\] keeps 0 units, and min_units=1; min"):
        hc.compact(model, x, keep={"inner": []})
    small = hc.compact(model, x, keep={"inner": []}, min_units=0)
    assert small.inner.out_features == 0
    with torch.no_grad():
        stem = model.stem(x)
        torch.testing.assert_close(small(x), model.head(stem + model.outer.bias))


def test_inputs_by_keyword_and_the_graph_form() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    small = hc.compact(Keyed(), (), {"x": torch.randn(3, 4)}, keep={"a": [1]}, form="graph")
    assert hc.CompactionPlan.of(small).form == "graph"
    assert small(x=torch.randn(7, 4)).shape == (7, 2)


def plain(keep: Any, **settings: Any) -> nn.Module:
    return hc.compact(dense(), torch.randn(3, 4), keep=keep, **settings)


GOOD = {"0": [0]}
WRONG: dict[str, tuple[Any, str]] = {
    "group": (lambda: plain({"conv": [0]}), "keep: 'conv' is not a group; the groups are 0, 2"),
    "mapping": (lambda: plain([0]), "keep takes a mapping from names of groups to the units"),
    "length": (lambda: plain({"0": [True] * 5}), "keep['0'] is a mask of 5 bools, and the group "
               "has 6 units"),
    "range": (lambda: plain({"0": [0, 6]}), "keep['0'] has the index 6, and the group has the "
              "units 0 to 5"),
    "negative": (lambda: plain({"0": [-1]}), "keep['0'] has the index -1"),
    "twice": (lambda: plain({"0": [1, 0, 1]}), "has the index 1 more than once; a mask takes"),
    "floats": (lambda: plain({"0": [0.0, 1.0]}), "has the type torch.float32; a mask takes bools"),
    "bytes": (lambda: plain({"0": torch.ones(6, dtype=torch.uint8)}), "has the type torch.uint8"),
    "words": (lambda: plain({"0": "all"}), "keep['0'] takes a mask of bools or the indices of "
              "units, not 'all'"),
    "matrix": (lambda: plain({"0": [[True] * 6]}), "keep['0'] has 2 dimensions"),
    "few": (lambda: plain({"0": [0, 3]}, min_units=3), "keep['0'] keeps 2 units, and min_units=3"),
    "none": (lambda: plain({"0": [False] * 6}), "keep['0'] keeps 0 units, and min_units=1; min_un"),
    "round_to": (lambda: plain(GOOD, round_to=8), "leave out budget, round_to, uniform"),
    "budget": (lambda: plain(GOOD, budget=1), "leave out budget, round_to, uniform"),
    "batches": (lambda: plain(GOOD, batches=[1], loss=len), "leave out budget, round_to, uniform"),
    "no inputs": (lambda: hc.compact(dense(), keep=GOOD), "pass example_inputs or kwargs"),
    "no mask": (lambda: hc.compact(dense(), torch.randn(3, 4)), "for a plain model pass example"),
    "no model": (lambda: hc.compact({}, keep=GOOD), "not a dict"),  # type: ignore[arg-type]
    "two inputs": (
        lambda: hc.compact(hc.attach_gates(dense(), torch.randn(3, 4)), torch.randn(3, 4)),
        "a gated model has the example inputs of attach_gates"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG.keys())
def test_refused(call: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert words in str(error.value)


def test_a_model_with_gates_is_not_taken_for_a_plain_one() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    with pytest.raises(SiteError, match="this model has gates already"):
        hc.compact(gated.model, torch.randn(3, 4), keep=GOOD)


def test_a_refusal_changes_nothing() -> None:
    model = Joined()
    before = [(name, type(module)) for name, module in model.named_modules()]
    state = torch.get_rng_state()
    with pytest.raises(ArgumentError):
        hc.compact(model, torch.zeros(3, 4), keep={"left": [99]})
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_shrunk_model() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    gated.gates.log_alpha.data[:2] = -20.0
    assert hc.shrink(gated, None, pays=0)
    small = hc.compact(gated, keep={"0": [0, 3]})  # of the four that are left
    assert hc.CompactionPlan.of(small).groups["0"].kept == (2, 5)
