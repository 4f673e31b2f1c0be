"""Pooling, resizing and padding keep the labels of channels."""

import pytest
from torch import nn
from torch.nn import functional as F

from tests.graph.operators.contract import IMAGE, assert_contract, case, conv

OUT = "out: 4 fixed"


def cut_copy(_, h):
    """All that only moves and mixes places."""
    h = F.max_pool2d(F.interpolate(h, scale_factor=2), 2, return_indices=True)[0]
    h = F.pad(F.pad(h, (1, 0, -1, 2), value=3.0), (1, 1, 0, 0), mode="reflect")
    h = F.interpolate(F.lp_pool2d(h + 1, 2, 2), (5, 5), mode="bilinear")
    return F.adaptive_max_pool2d(h, 2)


CASES = [
    case("resized", lambda: conv(cut_copy), IMAGE, {"inp": 8}, OUT),
    # one new channel before and three after; they hold a constant and stay
    case("pad_channels", lambda: conv(lambda _, h: F.pad(h, (0, 0, 0, 0, 1, 3), value=2.0), 8, 12),
         IMAGE, {"inp": 8}, OUT),
    # a shortcut padded with zeros: map k of inp is map k + 1 of wide
    case("zero_padded_shortcut", lambda: conv(lambda net, h: F.pad(h, (0, 0, 0, 0, 1, 3)) +
         net.wide(h), 8, 12, wide=nn.Conv2d(8, 12, 1)), IMAGE, {"inp": 8, "wide[0:12]": 4}, OUT),
    case("cut_channels", lambda: conv(lambda _, h: F.pad(h, (0, 0, 0, 0, -1, 0)), 8, 7), IMAGE, {},
         "8 fixed: negative padding cuts some off"),
    case("window_over_channels", lambda: conv(lambda _, h: F.local_response_norm(h, 3)), IMAGE, {},
         "8 fixed: a window or a resize reads its neighbours"),
    case("no_rule", lambda: conv(lambda _, h: F.fold(F.unfold(h, 3), 8, 3)), IMAGE, {},
         "8 fixed: this operator has no rule (im2col"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
