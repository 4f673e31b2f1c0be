"""Integers of modules that are sizes or numbers of units, and those that only look like it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.plan import Cut, KeptUnits
from hardconcrete.compaction.size_attributes import MAX_ATTRIBUTES_IN_TURN, size_guesses
from hardconcrete.errors import CompactionError
from tests.compaction.networks import dense, gap, with_shut


class Halves(nn.Module):
    """Keeps a width as an attribute, and a number that only looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.other, self.flag = 6, 6, True
        self.a, self.b = nn.Linear(4, 12), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h[:, : self.width] * h[:, self.width :].sigmoid()) * self.other


def test_sizes_kept_as_attributes_are_found_by_trying() -> None:
    gated = hc.attach_gates(Halves(), torch.randn(3, 4))
    small = hc.compact(with_shut(gated, {"a": [0, 3]}), form="module")
    assert (small.width, small.other, small.flag) == (4, 6, True)
    assert hc.CompactionPlan.of(small).attributes == {".width": 4}
    assert gap(gated, small, torch.randn(5, 4)) < 1e-5


def test_what_is_guessed() -> None:
    plan = hc.CompactionPlan(
        "Halves", {}, (Cut("a.bias", 0, 12, (1,)), Cut("b.weight", 1, 6, (1, 2)))
    )
    assert list(size_guesses(plan, Halves())) == [
        {".width": 2, ".other": 2}, {".width": 2}, {".other": 2},
    ]  # fmt: skip
    unclear = Cut("a.weight", 0, 6, (1, 2, 3))
    both = hc.CompactionPlan("Halves", {}, (*plan.cuts, unclear))
    assert list(size_guesses(both, Halves())) == []
    assert list(size_guesses(plan, dense())) == []


class Heads(nn.Module):
    """Four heads of three: their number is no size of any tensor that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(x.shape[0], self.num_heads, 3).softmax(-1)
        return self.outer(heads.flatten(1))


def test_the_number_of_units_is_found() -> None:
    x = torch.randn(6, 8)
    gated = hc.attach_gates(Heads(), x)
    assert [(group.name, group.units) for group in gated.groups] == [("inner", 4)]
    small = hc.compact(with_shut(gated, {"inner": [1]}), form="module")
    assert (small.num_heads, small.inner.out_features) == (3, 9)
    assert gap(gated, small, x) < 1e-5
    assert hc.CompactionPlan.of(small).attributes == {".num_heads": 3}


def test_it_is_found_while_training_too() -> None:
    gated = hc.attach_gates(Heads(), torch.randn(6, 8))
    gated.gates.log_alpha.data[1] = -20.0
    assert hc.shrink(gated, None, pays=0)
    assert (gated.model.num_heads, gated.groups[0].units) == (3, 3)


def test_a_file_holds_it(tmp_path: Any) -> None:
    x = torch.randn(6, 8)
    small = hc.compact(Heads(), x, keep={"inner": [0, 3]})
    hc.save(tmp_path / "small.safetensors", small)
    loaded = hc.load(tmp_path / "small.safetensors", Heads())
    assert loaded.num_heads == 2
    torch.testing.assert_close(loaded(x), small(x))


class Temperature(Heads):
    """A wrong guess would run: the number of heads is also what outputs are divided by."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.num_heads


def test_a_wrong_guess_is_not_delivered() -> None:
    x = torch.randn(6, 8)
    gated = with_shut(hc.attach_gates(Temperature(), x), {"inner": [1]})
    with pytest.raises(CompactionError, match="its outputs differ by "):
        hc.compact(gated, form="module")
    small = hc.compact(gated)
    assert hc.CompactionPlan.of(small).form == "graph"
    assert gap(gated, small, x) < 1e-5


class Decoys(nn.Module):
    """Sizes, a number of heads and three numbers that equal them."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.num_heads = 12, 4
        self.rounds = 4
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).reshape(x.shape[0], self.num_heads, -1).softmax(-1)
        for _ in range(self.rounds):
            heads = heads.tanh()
        return self.outer(heads.reshape(-1, self.width))


def test_one_of_several_equal_numbers() -> None:
    x = torch.randn(6, 8)
    gated = with_shut(hc.attach_gates(Decoys(), x), {"inner": [1]})
    small = hc.compact(gated, form="module")
    assert (small.width, small.num_heads, small.rounds) == (9, 3, 4)
    assert gap(gated, small, x) < 1e-5


class Mixing(nn.Module):
    """No parameters: its number of heads is that of units made elsewhere."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.num_heads, 3).softmax(-1).flatten(1)


class Depthwise(nn.Module):
    """Stores its number of groups, and gets its weight from elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.groups = width

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.conv2d(x, weight, groups=self.groups)


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 3, 1)
        self.kernels = nn.Parameter(torch.randn(6, 1, 3, 3))
        self.middle = Depthwise(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x), self.kernels).relu())


def test_modules_without_parameters() -> None:
    x = torch.randn(6, 8)
    gated = hc.attach_gates(nn.Sequential(nn.Linear(8, 12), Mixing(4), nn.Linear(12, 5)), x)
    small: Any = hc.compact(with_shut(gated, {"0": [0]}), form="module")
    assert (small[1].num_heads, small[2].in_features) == (3, 9)
    images = torch.randn(3, 2, 5, 5)
    gated = hc.attach_gates(Separable(), images)
    small = hc.compact(with_shut(gated, {"first": [2, 4]}), form="module")
    assert small.middle.groups == 4
    assert gap(gated, small, images) < 1e-5


def test_what_is_guessed_from_units() -> None:
    cuts = (Cut("inner.weight", 0, 12, (0,) * 9), Cut("outer.weight", 1, 12, (0,) * 9))
    plan = hc.CompactionPlan("Decoys", {"inner": KeptUnits(4, (0, 2, 3))}, cuts)
    assert list(size_guesses(plan, Decoys())) == [
        {".width": 9},
        {".width": 9, ".num_heads": 3},
        {".width": 9, ".rounds": 3},
        {".width": 9, ".num_heads": 3, ".rounds": 3},
        {".num_heads": 3, ".rounds": 3},
        {".num_heads": 3},
        {".rounds": 3},
    ]
    assert list(size_guesses(hc.CompactionPlan("S", plan.groups, cuts), dense())) == []


def test_groups_of_a_module_come_before_others() -> None:
    """Two groups of four units lose one and two: each module has its own answer."""
    model = nn.Sequential(Heads(), nn.Linear(5, 8), Heads())
    groups = {"0.inner": KeptUnits(4, (0, 1, 2)), "2.inner": KeptUnits(4, (0, 1))}
    plan = hc.CompactionPlan("Sequential", groups, ())
    assert {"0.num_heads": 3, "2.num_heads": 2} in list(size_guesses(plan, model))
    one_each = hc.CompactionPlan("Sequential", {"a": groups["0.inner"], "b": groups["2.inner"]}, (
        Cut("0.inner.weight", 0, 12, tuple(range(9))), Cut("2.inner.weight", 0, 12, tuple(range(6)))
    ))  # fmt: skip
    assert {"0.num_heads": 3, "2.num_heads": 2} in list(size_guesses(one_each, model))


@pytest.mark.parametrize("count", [MAX_ATTRIBUTES_IN_TURN, 40])
def test_the_number_of_guesses_is_bounded(count: int) -> None:
    model = Decoys()
    for k in range(count // 2 - 2):
        setattr(model, f"size{k}", 12)
        setattr(model, f"number{k}", 4)
    cuts = (Cut("inner.weight", 0, 12, (0,) * 9),)
    plan = hc.CompactionPlan("Decoys", {"inner": KeptUnits(4, (0, 2, 3))}, cuts)
    guesses = list(size_guesses(plan, model))
    assert len(guesses) <= 6 * MAX_ATTRIBUTES_IN_TURN + 2
    assert all(guess not in guesses[:k] for k, guess in enumerate(guesses))
    if count > MAX_ATTRIBUTES_IN_TURN:
        assert [len(guess) for guess in guesses] == [19, 39]


def test_what_has_one_name_changes_together() -> None:
    """As all heads of a deep model; a number beside them that no forward reads stays as it is."""
    x = torch.randn(6, 8)
    model = nn.Sequential(*(nn.Sequential(Heads(), nn.Linear(5, 8)) for _ in range(14)))
    model.register_module("last", Heads())
    for module in model.modules():
        if isinstance(module, Heads):
            module.unread = 4
    keep = {group.name: [0, 1, 3] for group in hc.find_groups(model, x) if group.units == 4}
    assert len(keep) == 15 > MAX_ATTRIBUTES_IN_TURN
    small = hc.compact(model, x, keep=keep, form="module")
    heads = [module for module in small.modules() if isinstance(module, Heads)]
    assert {(module.num_heads, module.unread) for module in heads} == {(3, 4)}


class Conv1D(nn.Module):
    """The dense layer of GPT-2, with its sizes as attributes."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight).view(len(x), self.nf)


def test_a_transposed_dense_layer_has_the_sizes_of_its_weight() -> None:
    """Both have 8 units; those of the first one are cut, and the outputs of the second are not."""
    x = torch.randn(3, 8)
    gated = hc.attach_gates(nn.Sequential(Conv1D(8, 8), nn.ReLU(), Conv1D(8, 8)), x)
    small: Any = hc.compact(with_shut(gated, {"0": [0, 5]}), form="module")
    assert [(layer.nx, layer.nf) for layer in (small[0], small[2])] == [(8, 6), (6, 8)]
    assert gap(gated, small, x) < 1e-5


class Silent(nn.Module):
    """Fails without a word unless a number is right; another number equals a size and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.all_heads, self.num_heads = 12, 12, 4
        self.inner, self.outer = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.width:
            raise AssertionError
        heads = self.inner(x).view(x.shape[0], self.num_heads, 3).softmax(-1)
        return self.outer(heads.reshape(-1, self.all_heads))


def test_not_every_number_that_equals_a_size_is_one() -> None:
    x = torch.randn(6, 12)
    gated = hc.attach_gates(nn.Sequential(*(Silent() for _ in range(6))), x)
    shut = {f"{k}.inner": [k % 4] for k in range(6)}
    small: Any = hc.compact(with_shut(gated, shut), form="module")
    assert {(part.width, part.all_heads, part.num_heads) for part in small} == {(12, 9, 3)}
