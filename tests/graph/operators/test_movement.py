"""Movement operators move labels too; those that do not commute with removal fix them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hardconcrete.graph.operators.movement import movement
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
