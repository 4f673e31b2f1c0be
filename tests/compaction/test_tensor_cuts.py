"""Scissors: the same parameter objects, whatever else holds on to them."""

import pytest
import torch
from torch import nn

from hardconcrete.compaction.tensor_cuts import TensorCutter, refuse_unknown_state
from hardconcrete.errors import ArgumentError, CompactionError

KEPT = torch.tensor([0, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss_of_before_does_not_hold_on_to_the_shape(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(3, 4, dtype=dtype))
    loss = weight.square().sum()
    loss.backward()
    whole = weight.detach().clone()
    TensorCutter()(weight, 0, KEPT)
    assert torch.equal(weight, whole[KEPT])
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * whole[KEPT])
    weight.grad = None
    weight.sum().backward()
    assert loss.grad_fn is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_state_of_the_same_shape_is_cut_and_other_state_is_not() -> None:
    weight, other = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
    optimizer = torch.optim.Adam([weight, other])
    (weight * other).sum().backward()
    optimizer.step()
    before = optimizer.state[weight]["exp_avg"].clone()
    TensorCutter([optimizer])(weight, 1, KEPT)
    assert torch.equal(optimizer.state[weight]["exp_avg"], before[:, KEPT])
    assert optimizer.state[weight]["step"] == 1
    assert optimizer.state[other]["exp_avg"].shape == (3, 3)


def test_buffers_are_cut() -> None:
    counts = torch.arange(3)
    TensorCutter()(counts, 0, KEPT)
    assert counts.tolist() == [0, 2]


def test_what_cannot_be_cut_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = torch.optim.Adafactor([weight])
    weight.sum().backward()
    optimizer.step()
    with pytest.raises(CompactionError, match=r"Adafactor keeps a tensor of shape \[3, 1\]"):
        refuse_unknown_state([optimizer], [weight])
    with pytest.raises(ArgumentError, match="this Adafactor trains no parameter"):
        refuse_unknown_state([optimizer], [nn.Parameter(torch.zeros(2))])
