"""Concatenation, stacking and embeddings."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardconcrete as hc
from tests.exactness import assert_exact
from tests.graph.operators.contract import (
    IMAGE,
    ROW,
    SEQUENCE,
    Network,
    assert_contract,
    case,
    dense,
    parameter,
)

OUT = "out: 4 fixed"


def token() -> Network:
    """A parameter joined along time shares the width."""
    layers = {"token": parameter(1, 1, 12), "inp": nn.Linear(6, 12), "out": nn.Linear(12, 4)}
    return Network(
        lambda net, x: net.out(torch.cat([net.token.expand(len(x), -1, -1), net.inp(x)], 1)),
        **layers,
    )


def with_input() -> Network:
    """The input's own columns stay."""
    layers = {"inp": nn.Linear(6, 12), "out": nn.Linear(18, 4)}
    return Network(lambda net, x: net.out(torch.cat([x, net.inp(x)], -1).relu()), **layers)


def places() -> Network:
    """Maps joined with their coordinates, which stay."""
    layers = {"inp": nn.Conv2d(3, 8, 3, padding=1), "out": nn.Conv2d(9, 4, 1)}

    def forward(net, x):
        rows = torch.linspace(0, 1, 8).view(1, 1, 8, 1).expand(x.size(0), 1, 8, 8)
        return net.out(torch.cat([net.inp(x).relu(), rows], 1))

    return Network(forward, **layers)


def partly_turned() -> Network:
    """Three heads; features that are turned by angles made in the forward, joined with others."""
    layers = {"inp": nn.Linear(6, 12), "key": nn.Linear(6, 12), "out": nn.Linear(12, 4)}

    def turned(x):
        x = x.unflatten(-1, (-1, 4)).transpose(1, 2)
        return torch.cat([x[..., :2] * torch.arange(1, 3), x[..., 2:]], -1)

    def forward(net, x):
        q, k = turned(net.inp(x)), turned(net.key(x))
        return net.out((q @ k.mT @ k).transpose(1, 2).flatten(2))

    return Network(forward, **layers)


CASES = [
    case("partly_turned", partly_turned, SEQUENCE, {"inp": 3}, OUT),
    case("cat_last", lambda: dense(lambda _, h: torch.cat([h, h.tanh()], -1), 6, 12), ROW,
         {"inp": 6}, OUT),
    case("hstack", lambda: dense(lambda _, h: torch.hstack([h, h.tanh()]), 6, 12), ROW, {"inp": 6},
         OUT),
    case("token", token, SEQUENCE, {"inp": 12}, OUT),
    case("with_input", with_input, ROW, {"inp": 12}, OUT),
    case("places", places, IMAGE, {"inp": 8}, OUT),
    case("stack_last", lambda: dense(lambda _, h: torch.stack([h, h.tanh()], -1).flatten(1), 6, 12),
         ROW, {"inp": 6}, OUT),
    case("stack_first", lambda: dense(lambda _, h: torch.stack([h, h.tanh()], 1).flatten(1), 6, 12),
         ROW, {"inp": 6}, OUT),
    case("glu", lambda: dense(lambda _, h: F.glu(h, -1), 12, 6), ROW, {"inp": 6}, OUT),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["embedding", "bag", "index"])
def test_embedding_rows_are_fixed_and_the_width_is_free(kind: str) -> None:
    table = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}.get(kind)
    choose = (lambda net, ids: net.table[ids]) if table is None else lambda net, ids: net.table(ids)
    model = Network(
        lambda net, ids: net.out(choose(net, ids)),
        table=table(9, 12) if table else parameter(9, 12),
        out=nn.Linear(12, 4),
    )
    (group,) = hc.find_groups(model, torch.randint(9, (2, 5)))
    assert (group.name, group.kind, group.units) == ("table", "embedding dimension", 12)
    assert (group.parameters, group.macs) == (9 + 4, 4 if kind == "bag" else 5 * 4)
    assert_exact(model, lambda batch: ((torch.randint(9, (batch, 5)),), {}))


@pytest.mark.parametrize(("build", "shape", "groups", "why"), CASES)
def test_contract(build, shape, groups, why) -> None:
    assert_contract(build, shape, groups, why)
