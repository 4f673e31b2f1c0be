"""Elementwise operators unite the labels at one index, and constants fix them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from tests.graph.operators.contract import (
    IMAGE,
    ROW,
    SEQUENCE,
    Network,
    assert_contract,
    case,
    conv,
    dense,
    parameter,
)

OUT = "out: 4 fixed"


def in_place(h):
    """Written through a view: the tensor itself has changed, too."""
    h = h.clone()
    h[:, 2:7].add_(1.0)
    h[:, 9] = 0.5
    return h.mul_(2)


def expanded() -> Network:
    """A number for each example, made as wide as the units: it shrinks with them."""
    layers = {"inp": nn.Linear(6, 12), "out": nn.Linear(12, 4)}
    return Network(lambda net, x: net.out(net.inp(x) + x[:, :1].expand(-1, 12)), **layers)


def repeated() -> Network:
    """The same by an operator that has no free copies: it cannot shrink."""
    layers = {"inp": nn.Linear(6, 12), "out": nn.Linear(12, 4)}
    return Network(lambda net, x: net.out(net.inp(x) + x[:, :1].repeat(1, 12)), **layers)


def positions() -> Network:
    layers = {"inp": nn.Linear(6, 12), "at": parameter(1, 9, 12), "out": nn.Linear(12, 4)}
    return Network(lambda net, x: net.out(net.inp(x) + net.at[:, : x.size(1)]), **layers)


def excited() -> Network:
    """Squeeze and excite: the factors are made as wide as the maps."""
    layers = {"down": nn.Linear(8, 5), "up": nn.Linear(5, 8)}
    return conv(
        lambda net, h: (
            h * net.up(net.down(h.mean((2, 3))).relu()).sigmoid()[:, :, None, None].expand_as(h)
        ),
        **layers,
    )


CASES = [
    case("numbers", lambda: dense(lambda _, h: (1 - torch.where(h > 0.3, h, 0.1)).clamp(-1, 2) / 3),
         ROW, {"inp": 12}, OUT),
    case("masked", lambda: dense(lambda _, h: h.masked_fill(h > 0.5, 2.0) * (h > 0.1)), ROW,
         {"inp": 12}, OUT),
    case("in_place", lambda: dense(lambda _, h: in_place(h)), ROW, {"inp": 11}, "1 fixed"),
    case("buffer", lambda: dense(lambda net, h: h * net.scale, scale=torch.randn(12)), ROW,
         {"inp": 12}, OUT),
    case("positions", positions, SEQUENCE, {"inp": 12}, OUT),
    case("prelu", lambda: conv(lambda net, h: net.act(-h), act=nn.PReLU(8)), IMAGE, {"inp": 8},
         OUT),
    case("excited", excited, IMAGE, {"inp": 8, "down": 5}, OUT),
    case("straight_through", lambda: dense(lambda _, h: h + (h.round() - h).detach()), ROW,
         {"inp": 12}, OUT),
    case("expanded", expanded, ROW, {"inp": 12}, OUT),
    case("repeated", repeated, ROW, {}, "cannot shrink: the model's input x"),
    case("dropout_off", lambda: dense(lambda _, h: F.dropout(h, training=False)), ROW, {"inp": 12},
         OUT),
    case("dropout_always", lambda: dense(lambda _, h: F.dropout(h)), ROW, {}, "a random number"),
    # softplus(0) is not 0: a gate on the parameter would not shut what it reads
    case("softplus_reader", lambda: Network(lambda net, x: net.inp(x) @ F.softplus(net.w),
         inp=nn.Linear(6, 12), w=parameter(12, 4)), ROW, {}, "no parameter reads it"),
    case("masked_reader", lambda: Network(lambda net, x: net.inp(x).relu() @ (net.mask * net.w),
         inp=nn.Linear(6, 12), w=parameter(12, 4), mask=torch.randn(12, 4).round()), ROW,
         {"inp": 12}, "w: 4 fixed"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)


@pytest.mark.parametrize(
    "change",
    [
        lambda y, p: y + p,
        lambda y, p: torch.maximum(y, p),
        lambda y, p: y - y.mean(1, keepdim=True) * p,
    ],
)
def test_adding_to_closed_units_keeps_them(change: Callable[..., Tensor]) -> None:
    """A map that is closed at its output is nonzero after an addition."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 3, 1)
            self.shift = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(change(self.conv(x), self.shift))

    torch.manual_seed(0)
    gated = hc.attach_gates(Added(), torch.randn(2, 2, 4, 4), sites=["conv:out"])
    with torch.no_grad():
        gated.gates.log_alpha[:3] = -9.0
    x = torch.randn(3, 2, 4, 4)
    with pytest.warns(hc.HardConcreteWarning, match="the model is not smaller"):
        small = hc.compact(gated)
    torch.testing.assert_close(small(x), gated.eval()(x))
