"""Fused attention and recurrent layers are fixed, with a reason; later layers are free."""

import pytest
from torch import nn
from torch.nn import functional as F

from tests.graph.operators.contract import SEQUENCE, Network, assert_contract, case


def recurrent(layer: nn.Module) -> Network:
    layers = {"inp": nn.Linear(6, 7), "layer": layer, "fc": nn.Linear(5, 9), "out": nn.Linear(9, 4)}
    return Network(lambda net, x: net.out(net.fc(net.layer(net.inp(x))[0][:, -1]).relu()), **layers)


def attention() -> Network:
    """Heads are fixed, and the tensor they come from; the layer after them is not."""
    layers = {"qkv": nn.Linear(6, 24), "fc": nn.Linear(8, 9), "out": nn.Linear(9, 4)}

    def forward(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        return net.out(net.fc(F.scaled_dot_product_attention(q, k, v)).relu())

    return Network(forward, **layers)


def multihead() -> Network:
    """Without a norm the width around attention is free."""
    layers = {"inp": nn.Linear(6, 8), "out": nn.Linear(8, 4)}
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    return Network(
        lambda net, x: net.out((h := net.inp(x)) + net.attend(h, h, h)[0]), attend=attend, **layers
    )


RECURRENT = "7 fixed: a recurrent layer keeps its sizes"
CASES = [
    case("sdpa", attention, SEQUENCE, {"fc": 9}, "24 fixed: attention heads"),
    case("multihead", multihead, SEQUENCE, {"inp": 8}, "attend.in_proj_weight: 24 fixed"),
    case(
        "lstm", lambda: recurrent(nn.LSTM(7, 5, batch_first=True)), SEQUENCE, {"fc": 9}, RECURRENT
    ),
    case("gru", lambda: recurrent(nn.GRU(7, 5, batch_first=True)), SEQUENCE, {"fc": 9}, RECURRENT),
    case("rnn", lambda: recurrent(nn.RNN(7, 5, batch_first=True)), SEQUENCE, {"fc": 9}, RECURRENT),
]


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
