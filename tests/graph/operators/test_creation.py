"""Constants shrink with the tensors they are combined with, unless values depend on sizes."""

import pytest
import torch
from torch import nn

from tests.graph.operators.contract import (
    ROW,
    SEQUENCE,
    Network,
    assert_contract,
    case,
    dense,
)


def initial_state() -> Network:
    """A recurrence by hand, from a state of zeros: all steps share the 12 units."""
    layers = {"inp": nn.Linear(6, 12), "step": nn.Linear(12, 12), "out": nn.Linear(12, 4)}

    def forward(net, x):
        state = x.new_zeros(x.size(0), 12)
        for now in x.unbind(1):
            state = torch.tanh(net.inp(now) + net.step(state))
        return net.out(state)

    return Network(forward, **layers)


def filled() -> Network:
    """A tensor of zeros into which two layers are written."""
    layers = {"inp": nn.Linear(6, 12), "other": nn.Linear(6, 8), "out": nn.Linear(20, 4)}

    def forward(net, x):
        joined = torch.zeros(x.size(0), 20)
        joined[:, :12] = net.inp(x)
        joined[:, 12:] = net.other(x)
        return net.out(joined.relu())

    return Network(forward, **layers)


NOISE = "12 fixed: a random number is drawn for each of them"
CASES = [
    case("initial_state", initial_state, SEQUENCE, {"inp": 12}, "output"),
    case("filled", filled, ROW, {"inp": 12, "other": 8}, "output"),
    case("like", lambda: dense(lambda _, h: torch.where(h > 0.3, h, torch.full_like(h, 0.5))), ROW,
         {"inp": 12}, "output"),
    case("noise", lambda: dense(lambda _, h: h + torch.rand_like(h)), ROW, {}, NOISE),
    case("arange", lambda: dense(lambda _, h: h * torch.arange(12.0)), ROW, {},
         "12 fixed: it is combined with a tensor that cannot shrink"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
