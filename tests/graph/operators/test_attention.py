"""The heads of fused attention are units; recurrent layers are fixed, with a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graph.operators.contract import SEQUENCE, Network, assert_contract, case


def recurrent(layer: nn.Module) -> Network:
    layers = {"inp": nn.Linear(6, 7), "layer": layer, "fc": nn.Linear(5, 9), "out": nn.Linear(9, 4)}
    return Network(lambda net, x: net.out(net.fc(net.layer(net.inp(x))[0][:, -1]).relu()), **layers)


def attention() -> Network:
    """One head: queries and keys are fixed, and the features of values are units."""
    layers = {"qkv": nn.Linear(6, 24), "fc": nn.Linear(8, 9), "out": nn.Linear(9, 4)}

    def forward(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        return net.out(net.fc(F.scaled_dot_product_attention(q, k, v)).relu())

    return Network(forward, **layers)


def heads(keys: int, mask: Tensor | None = None, **settings: Any) -> Network:
    """Four heads of three features, and ``keys`` heads of keys and values."""
    sizes = {"q": 12, "k": 3 * keys, "v": 3 * keys}
    layers = {name: nn.Linear(6, size) for name, size in sizes.items()}

    def forward(net, x):
        q, k, v = (getattr(net, name)(x).unflatten(-1, (-1, 3)).transpose(1, 2) for name in sizes)
        bias = None if mask is None else net.mask
        mixed = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=keys < 4, **settings)
        return net.out(mixed.transpose(1, 2).flatten(2))

    extra = {} if mask is None else {"mask": mask}
    return Network(forward, out=nn.Linear(12, 4), **layers, **extra)


def multihead(need_weights: bool = False, biases: bool = False) -> Network:
    """Without a norm the width around attention is free, too."""
    layers = {"inp": nn.Linear(6, 8), "out": nn.Linear(8, 4)}
    attend = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=biases)

    def forward(net, x):
        h = net.inp(x)
        return net.out(h + net.attend(h, h, h, need_weights=need_weights)[0])

    return Network(forward, attend=attend, **layers)


def returned() -> Network:
    """The mean of the weights over heads is an output."""
    attend = nn.MultiheadAttention(6, 2, batch_first=True)
    fc, out = nn.Linear(5, 9), nn.Linear(9, 4)
    return Network(
        lambda net, x: net.out(net.fc(net.attend(x, x, x)[1])), attend=attend, fc=fc, out=out
    )


RECURRENT = "7 fixed: a recurrent layer keeps its sizes"
CASES = [
    case("sdpa", attention, SEQUENCE, {"qkv": 8, "fc": 9}, "16 fixed: activations are"),
    case("heads", lambda: heads(4), SEQUENCE, {"q": 4}),
    case("causal", lambda: heads(4, is_causal=True, scale=0.7), SEQUENCE, {"q": 4}),
    case("grouped", lambda: heads(2), SEQUENCE, {"q": 2}),
    case("one_key_head", lambda: heads(1), SEQUENCE, {"q": 4}, "v: 3 fixed: other units lie"),
    case("mask", lambda: heads(4, torch.randn(5, 5)), SEQUENCE, {"q": 4}),
    case("mask_of_heads", lambda: heads(4, torch.randn(4, 5, 5)), SEQUENCE, {"q": 4}),
    case("boolean_mask", lambda: heads(2, torch.ones(5, 5).tril() > 0), SEQUENCE, {"q": 2}),
    case("multihead", multihead, SEQUENCE, {"inp": 8, "attend": 2}),
    case("multihead_weights", lambda: multihead(True), SEQUENCE, {"inp": 8, "attend": 2}),
    case("multihead_biases", lambda: multihead(False, True), SEQUENCE, {"inp": 8, "attend": 2}),
    case("weights_returned", returned, SEQUENCE, {"fc": 9}, "18 fixed: mean reads all of them"),
    case(
        "lstm", lambda: recurrent(nn.LSTM(7, 5, batch_first=True)), SEQUENCE, {"fc": 9}, RECURRENT
    ),
    case("gru", lambda: recurrent(nn.GRU(7, 5, batch_first=True)), SEQUENCE, {"fc": 9}, RECURRENT),
    case("rnn", lambda: recurrent(nn.RNN(7, 5, batch_first=True)), SEQUENCE, {"fc": 9}, RECURRENT),
]


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
