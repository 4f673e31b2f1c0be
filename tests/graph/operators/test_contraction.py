"""Sums over units: which parameter reads which units, for every way to write the sum."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.graph.operators.contract import (
    ROW,
    SEQUENCE,
    Network,
    assert_contract,
    case,
    dense,
    parameter,
)


def pair(function, first: tuple[int, ...], second: tuple[int, ...]) -> Network:
    """Two parameters: w makes the units that v reads."""
    return Network(function, w=parameter(*first), v=parameter(*second))


def read_by(function, *shapes: tuple[int, ...], **parts) -> Network:
    """The units of inp are read by a matrix that is computed from parameters."""
    named = {name: parameter(*shape) for name, shape in zip("abc", shapes, strict=False)}
    inp = nn.Linear(6, 12)
    return Network(lambda net, x: net.inp(x).relu() @ function(net), inp=inp, **named, **parts)


CASES = [
    case("linear_vector", lambda: Network(lambda net, x: F.linear(net.inp(x).relu(), net.w),
         inp=nn.Linear(6, 12), w=parameter(12)), SEQUENCE, {"inp": 12}),
    case("matmul_left", lambda: pair(lambda net, x: net.v @ (net.w @ x).relu(), (12, 5), (4, 12)),
         SEQUENCE, {"w": 12}),
    case("matmul_vector", lambda: pair(lambda net, x: (x @ net.w).relu() @ net.v, (6, 12), (12,)),
         SEQUENCE, {"w": 12}),
    case("matmul_broadcast",
         lambda: pair(lambda net, x: ((x.unsqueeze(1) @ net.w).relu() @ net.v), (3, 6, 12),
                      (3, 12, 4)), SEQUENCE, {"w": 12}),
    case("bmm_expanded",
         lambda: pair(lambda net, x: torch.bmm(x, net.w.expand(len(x), -1, -1)).relu() @ net.v,
                      (1, 6, 12), (12, 4)), SEQUENCE, {"w": 12}),
    case("einsum_dots",
         lambda: pair(lambda net, x: torch.einsum("...i,oi->...o",
                      torch.einsum("...i,io", x, net.w).relu(), net.v), (6, 12), (4, 12)),
         SEQUENCE, {"w": 12}),
    case("einsum_implicit",  # letters that stand once, by the alphabet: "ib" gives [b, i]
         lambda: pair(lambda net, x: torch.einsum("ib,ci", torch.einsum("ab,bi->ia", x, net.w)
                      .relu(), net.v), (6, 12), (4, 12)), ROW, {"w": 12}),
    case("tensordot", lambda: pair(lambda net, x: torch.tensordot(
         torch.tensordot(x, net.w, dims=1).relu(), net.v, dims=([-1], [1])), (6, 12), (4, 12)),
         SEQUENCE, {"w": 12}),
    case("product", lambda: read_by(lambda net: net.a @ net.b, (12, 3), (3, 4)), ROW, {"inp": 12}),
    case("product_plus", lambda: read_by(lambda net: net.a @ net.b + net.c, (12, 3), (3, 4), (1,)),
         ROW, {}, "12 fixed: no parameter reads it"),
    case("addmm", lambda: read_by(lambda net: torch.addmm(net.c, net.a, net.b), (12, 3), (3, 4),
         (1,)), ROW, {}, "12 fixed: no parameter reads it"),
    case("product_of_exp", lambda: read_by(lambda net: net.a.exp() @ net.b, (12, 3), (3, 4)),
         ROW, {}, "12 fixed: no parameter reads it"),
    case("linear_with_bias", lambda: read_by(lambda net: net.layer(net.a), (12, 3),
         layer=nn.Linear(3, 4)), ROW, {}, "12 fixed: no parameter reads it"),
    case("scaled", lambda: read_by(lambda net: net.a * net.b / 3, (12, 4), (12, 1)), ROW,
         {"inp": 12}),
    # activations without parameters that read them: what a product does not sum over is free
    case("graph_convolution", lambda: dense(lambda _, h: (h[:, :5] @ h[:, :5].T).softmax(-1) @ h,
         width=12), ROW, {"inp": 7}, "5 fixed: activations are multiplied"),
    case("features_in_common", lambda: dense(lambda _, h: torch.einsum("bth,bsh->bth", h, h)),
         SEQUENCE, {"inp": 12}),
    case("gram_flattened", lambda: dense(lambda _, h: (h.mT @ h).flatten(1), 6, 36), SEQUENCE, {},
         "6 fixed: other units lie along the same dimension"),
    case("gram_rows", lambda: Network(lambda net, x: net.out((net.inp(x).mT @ x).flatten(1)),
         inp=nn.Linear(6, 12), out=nn.Linear(72, 4)), SEQUENCE, {"inp": 12}),
    case("weights_of_heads", lambda: Network(lambda net, x: torch.einsum("bthd,hdo->bto", net.inp(x)
         .unflatten(-1, (3, 4)), net.w), inp=nn.Linear(6, 12), w=parameter(3, 4, 5)), SEQUENCE,
         {"inp": 3}, "w: 5 fixed"),
    case("activations", lambda: dense(lambda _, h: h @ (h.T @ h)), ROW, {},
         "12 fixed: activations are multiplied with activations"),
    case("letter_twice", lambda: dense(lambda net, h: h * torch.einsum("ii->i", net.w), w=torch.
         randn(12, 12)), ROW, {}, "12 fixed: it is combined with a tensor that cannot shrink"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
