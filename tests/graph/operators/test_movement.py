"""Movement operators move labels too; those that do not commute with removal fix them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.graph.labels import Labels
from hardconcrete.graph.operators.movement import _reshaped, movement
from hardconcrete.graph.propagation_state import OperatorCall, PropagationState
from hardconcrete.graph.values import Component, Value
from tests.graph.operators.contract import (
    IMAGE,
    ROW,
    SEQUENCE,
    Network,
    assert_contract,
    case,
    conv,
    dense,
)

OUT = "out: 4 fixed"
INDEXED = "it is indexed by numbers that are fixed"


def along_time(move, width: int = 12) -> Network:
    """[batch, time, units] between two dense layers."""
    layers = {"inp": nn.Linear(6, width), "out": nn.Linear(width, 4)}
    return Network(lambda net, x: net.out(move(net.inp(x).relu())), **layers)


def shuffled(layer: nn.Module) -> Network:
    return conv(lambda net, h: net.layer(F.channel_shuffle(h, 2)), 8, 6, layer=layer)


CASES = [
    case("chunk", lambda: dense(lambda _, h: torch.mul(*h.chunk(2, -1)), 12, 6), ROW, {"inp": 6},
         OUT),
    case("split", lambda: dense(lambda _, h: torch.cat(h.split([3, 9], -1)[::-1], -1)), ROW,
         {"inp": 12}, OUT),
    # units that are sliced off are read by nothing: they belong to no group
    case("last_four", lambda: dense(lambda _, h: h[:, -4:], 12, 4), ROW, {"inp[8:12]": 4}, OUT),
    case("every_third", lambda: dense(lambda _, h: h[:, ::3], 12, 4), ROW, {"inp[0:10]": 4}, OUT),
    case("one_index", lambda: dense(lambda _, h: h[:, -1:] * h), ROW, {"inp": 11},
         "1 fixed: an index or slice separates one unit"),
    case("repeat", lambda: dense(lambda _, h: h.repeat(1, 2).flip(1), 6, 12), ROW, {"inp": 6}, OUT),
    case("interleave", lambda: dense(lambda _, h: h.repeat_interleave(2, -1), 6, 12), ROW,
         {"inp": 6}, OUT),
    case("interleave_by_tensor", lambda: dense(lambda net, h: h.repeat_interleave(net.times, -1),
         6, 9, times=torch.tensor([1, 2, 1, 2, 1, 2])), ROW, {},
         "6 fixed: a tensor holds the number of repeats"),
    case("roll", lambda: dense(lambda _, h: h.roll(1, -1)), ROW, {}, "12 fixed: where a roll"),
    case("roll_and_turn_space", lambda: conv(lambda _, h: h.roll(1, 2).rot90(1, (2, 3))), IMAGE,
         {"inp": 8}, OUT),
    case("pixel_shuffle", lambda: conv(lambda net, h: net.layer(F.pixel_shuffle(h, 2)), 8, 6,
         layer=nn.Conv2d(2, 6, 3)), IMAGE, {"inp": 2, "layer": 6}, OUT),
    case("pixel_unshuffle", lambda: conv(lambda net, h: net.layer(F.pixel_unshuffle(h, 2)), 8, 6,
         layer=nn.Conv2d(32, 6, 3)), IMAGE, {"inp": 8, "layer": 6}, OUT),
    case("channel_shuffle", lambda: shuffled(nn.Conv2d(8, 6, 3)), IMAGE, {"inp": 4, "layer": 6},
         OUT),
    # the shuffle ties k and k + 4; groups of the result tie 2j and 2j + 1 of what it made
    case("shuffle_groups", lambda: shuffled(nn.Conv2d(8, 6, 3, groups=2)), IMAGE,
         {"inp": 2, "layer": 3}, OUT),
    case("squeeze_all", lambda: Network(lambda net, x: net.out(net.inp(x).mean((2, 3), keepdim=True)
         .squeeze()), inp=nn.Conv2d(3, 8, 3), out=nn.Linear(8, 4)), IMAGE, {"inp": 8}, OUT),
    # two kinds of units along one dimension: the more stay, the fewer are fixed
    case("outer", lambda: Network(lambda net, x: net.out((net.inp(x)[:, :, None] * net.other(x)
         [:, None]).flatten(1)), inp=nn.Linear(6, 12), other=nn.Linear(6, 5), out=nn.Linear(60, 4)),
         ROW, {"inp": 12}, "5 fixed: other units lie along the same dimension"),
    case("turned", lambda: along_time(lambda h: h.moveaxis(-1, 1).swapdims(1, 2)), SEQUENCE,
         {"inp": 12}, OUT),
    case("times_by_list", lambda: along_time(lambda h: h[:, [0, -1]]), SEQUENCE, {"inp": 12}, OUT),
    case("last_time_each", lambda: along_time(lambda h: h[torch.arange(len(h)), torch.full((len(h),
         ), 3)]), SEQUENCE, {"inp": 12}, OUT),
    case("apart", lambda: along_time(lambda h: h.unflatten(1, (5, 1))[torch.arange(len(h)), :,
         torch.zeros(len(h)).long()]), SEQUENCE, {"inp": 12}, OUT),
    case("mask", lambda: along_time(lambda h: h[h[..., 0] > 9]), SEQUENCE, {}, INDEXED),
    case("units_by_list", lambda: dense(lambda _, h: h[:, [0, -1, 3]], 12, 3), ROW, {}, INDEXED),
    case("gather", lambda: dense(lambda _, h: h.gather(1, h.argsort(1))), ROW, {}, "12 fixed"),
    case("index_select", lambda: along_time(lambda h: h.index_select(1, torch.tensor([3, 0]))),
         SEQUENCE, {"inp": 12}, OUT),
    case("bits", lambda: dense(lambda _, h: h * (h.view(torch.int32) > 0)), ROW, {},
         "12 fixed: its bits are read as another dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)


def test_labels_are_not_as_large_as_activations() -> None:
    """[batch, time, 3, heads, features] has labels for its last three dimensions only."""
    state, labels = PropagationState(), torch.arange(24).reshape(1, 1, 24)
    state.labels.fresh(24)
    value, shape = Value((7, 50, 24), (Component(labels),)), [7, 50, 3, 2, 4]
    arguments = {"self": value, "size": shape}
    view = OperatorCall("view", arguments, (tuple(shape),), "", torch.ops.aten.view.default)
    (part,) = movement(state, view).components
    assert part.labels.shape == (1, 1, 3, 2, 4)
    arguments = {"self": Value(tuple(shape), (part,)), "dims": [2, 0, 3, 1, 4]}
    made = ((3, 7, 2, 50, 4),)
    call = OperatorCall("permute", arguments, made, "", torch.ops.aten.permute.default)
    (part,) = movement(state, call).components
    assert part.labels.shape == (3, 1, 2, 1, 4)


RESHAPED = {
    "merged": ((4, 6, 5), (24, 5), (1, 6, 1), (24, 1)),
    "merged, equal": ((4, 6, 5), (24, 5), (1, 1, 5), (1, 5)),
    "split": ((4, 6), (2, 2, 6), (1, 6), (1, 1, 6)),
    "across": ((4, 6), (8, 3), (4, 1), (8, 3)),
    "sizes of 1": ((1, 4, 1, 6), (4, 1, 1, 2, 3, 1), (1, 4, 1, 1), (4, 1, 1, 1, 1, 1)),
    "to a number": ((1, 1), (), (1, 1), ()),
    "from a number": ((), (1, 1), (), (1, 1)),
}


@pytest.mark.parametrize(("before", "after", "shape", "small"), RESHAPED.values(), ids=RESHAPED)
def test_reshaped_labels_stay_small(
    before: tuple[int, ...], after: tuple[int, ...], shape: tuple[int, ...], small: tuple[int, ...]
) -> None:
    labels = torch.rand(shape)
    result = _reshaped(labels, before, after)
    assert tuple(result.shape) == small
    assert torch.equal(result.expand(after), labels.expand(before).reshape(after))


class Grouped(nn.Module):
    """Attention with two queries for each key and value, which are copied in either way."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.interleaved = interleaved

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            return x.repeat_interleave(2, 1).flip(-2)
        batch, heads, length, size = x.shape
        return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(batch, 2 * heads, length, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, self.copied(k), self.copied(v))
        return self.o(mixed.transpose(1, 2).reshape(batch, length, 16))


@pytest.mark.parametrize("interleaved", [False, True])
def test_labels_are_as_small_for_long_inputs(
    monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    largest = [0]
    find = Labels.find

    def watched(self: Labels, labels: torch.Tensor) -> torch.Tensor:
        largest[-1] = max(largest[-1], labels.untyped_storage().nbytes())
        return find(self, labels)

    monkeypatch.setattr(Labels, "find", watched)
    for length in (3, 300):
        largest.append(0)
        found = hc.find_groups(Grouped(interleaved), torch.zeros(2, length, 8))
        assert [(group.kind, group.units) for group in found] == [("attention head", 2)]
    assert largest[1] == largest[2]
