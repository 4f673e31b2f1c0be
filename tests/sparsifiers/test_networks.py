"""Every method on ten networks: two steps of training, then a small model that is the same."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import hardconcrete as hc
from hardconcrete.sparsifiers import METHODS
from tests.exactness import apart, outputs
from tests.sparsifiers.families import penalty_of
from tests.zoo import ZOO, Entry

CONVOLUTIONAL = ("lenet", "vgg", "resnet", "mobilenet", "inception")
TRANSFORMERS = ("torch_encoder", "vision_transformer", "llama", "attention_chunked", "torch_stack")
TOLERANCE = 1e-12
"""Largest difference, as a part of the output's scale, in float64."""


@cache
def network(name: str) -> tuple[nn.Module, Entry]:
    """One model of each network: its analysis is made once, for all methods."""
    (entry,) = (entry for entry in ZOO if entry.name == name)
    torch.manual_seed(0)
    return entry.build().double(), entry


def inputs(entry: Entry, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(double, entry.inputs(batch))  # type: ignore[no-any-return]


@pytest.fixture
def gated(name: str, method: str) -> Iterator[hc.GatedModel]:
    model, entry = network(name)
    torch.manual_seed(1)
    attached = hc.attach_gates(model, *inputs(entry, 2), method=method)
    yield attached
    hc.remove_gates(attached)


@pytest.mark.unwatched
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONVOLUTIONAL + TRANSFORMERS)
def test_two_steps_and_exact(name: str, gated: hc.GatedModel) -> None:
    _, entry = network(name)
    optimizer = torch.optim.SGD(gated.train().parameters(), lr=1e-3)
    penalty = penalty_of(gated, optimizer)
    for _ in range(2):
        args, kwargs = inputs(entry, 4)
        loss = sum(t.square().mean() for t in tree_leaves(gated(*args, **kwargs))) + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.step()
    shut = torch.rand(gated.gates.count) < 0.3
    certain = gated.gates.family.certain(~shut)
    with torch.no_grad():  # the other gates stay as they were trained
        for key, values in gated.gates.gate_parameters().items():
            values.copy_(torch.where(shut, certain[key], values))
    small = hc.compact(gated.eval())
    three = inputs(entry, 3)
    assert apart(outputs(gated, three), outputs(small.eval(), three)) < TOLERANCE
    args, kwargs = inputs(entry, 2)
    dense, now = hc.count(hc.remove_gates(gated), args, kwargs), hc.count(small, args, kwargs)
    assert now.params < dense.params or gated.gates.family.per_weight
