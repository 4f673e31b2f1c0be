"""Norms per channel keep labels; norms over channels fix them."""

import pytest
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

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


def then(norm: nn.Module) -> Network:
    return conv(lambda net, h: net.norm(h), norm=norm)


def over_time() -> Network:
    """Channels of the batch norm are the 5 times, so it reads all 12 units of each."""
    return dense(lambda net, h: net.norm(h), norm=nn.BatchNorm1d(5))


def normed_weight(dim: int | None) -> Network:
    """12 units, a layer with 10 whose weight is normed, and what reads them."""
    layer = weight_norm(nn.Linear(12, 10), dim=dim)
    return dense(lambda net, h: net.layer(h).relu(), 12, 10, layer=layer)


CASES = [
    case("batch", lambda: then(nn.BatchNorm2d(8)), IMAGE, {"inp": 8}, OUT),
    case("batch_without_statistics", lambda: then(nn.BatchNorm2d(8, track_running_stats=False)),
         IMAGE, {"inp": 8}, OUT),
    case("instance", lambda: then(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
         IMAGE, {"inp": 8}, OUT),
    case("batch_over_time", over_time, SEQUENCE, {}, "12 fixed: batch_norm reads all of them"),
    case("groups", lambda: then(nn.GroupNorm(2, 8)), IMAGE, {"inp": 2}, OUT),
    case("groups_without_weight", lambda: then(nn.GroupNorm(4, 8, affine=False)), IMAGE,
         {"inp": 4}, OUT),
    case("groups_of_one", lambda: then(nn.GroupNorm(8, 8)), IMAGE, {"inp": 8}, OUT),
    case("one_group", lambda: then(nn.GroupNorm(1, 8)), IMAGE, {}, "8 fixed: group_norm"),
    case("groups_by_function", lambda: conv(lambda _, h: F.group_norm(h, 4)), IMAGE, {"inp": 4},
         OUT),
    case("layer", lambda: dense(lambda net, h: net.norm(h), norm=nn.LayerNorm(12)), ROW, {},
         "12 fixed: layer_norm normalises over all of them (layer_norm in norm)"),
    case("layer_over_space", lambda: conv(lambda _, h: F.layer_norm(h, (8, 8))), IMAGE, {"inp": 8},
         OUT),
    case("rms", lambda: dense(lambda net, h: net.norm(h), norm=nn.RMSNorm(12)), ROW, {},
         "12 fixed: rms_norm"),
    # the norm of a row reads all columns, the norm of a column all rows, of all both
    case("weight_rows", lambda: normed_weight(0), ROW, {"layer": 10}, "12 fixed"),
    case("weight_columns", lambda: normed_weight(1), ROW, {"inp": 12}, OUT),
    case("weight_whole", lambda: normed_weight(None), ROW, {}, "12 fixed"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
