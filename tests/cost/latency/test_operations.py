"""Operators at the widths that compaction really leaves."""

import copy

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.cost.latency.operations import Operation, TensorSpec, Width, operations
from hardconcrete.cost.ledger_writer import LedgerWriter
from hardconcrete.gating.cost_model import gate_places
from hardconcrete_paper.models import LeNet5

aten = torch.ops.aten


def found(gated: hc.GatedModel, plain: nn.Module, batch: int) -> list[Operation]:
    example = gated.example
    return operations(LedgerWriter(plain, example, gate_places(gated)), plain, example, batch)


def test_the_operators_of_lenet() -> None:
    plain = LeNet5()
    gated = hc.attach_gates(copy.deepcopy(plain), torch.zeros(2, 1, 28, 28))
    names = [one.name for one in found(gated, plain, 2)]
    assert names[3] == "conv2d.default(float32[2,a20,12,12], float32[b50,a20,5,5], float32[b50])"
    assert names[7] == "linear.default(float32[2,a800], float32[b500,a800], float32[b500])"
    assert len(names) == 10


def test_shapes_of_a_batch_of_one() -> None:
    """All shapes as they are when the model is called with one example."""
    plain = LeNet5()
    gated = hc.attach_gates(copy.deepcopy(plain), torch.zeros(2, 1, 28, 28))
    one, two = (found(gated, plain, batch) for batch in (1, 2))
    for small, large in zip(one, two, strict=True):
        assert small.args[0].shape == (1, *large.args[0].shape[1:])
        assert small.args[1:] == large.args[1:]


def test_a_layer_that_selects_gathers_first() -> None:
    plain = LeNet5()
    sites = ["conv2:out", "fc1:in"]
    gated = hc.attach_gates(copy.deepcopy(plain), torch.zeros(2, 1, 28, 28), sites=sites)
    ones = found(gated, plain, 2)
    gather = next(one for one in ones if one.selects)
    assert gather.name == "index_select.default(float32[2,a800], 1, int64[b800])"
    dense = ones[ones.index(gather) + 1]
    assert dense.widths == (gather.widths[1],)


def test_a_depthwise_convolution_has_one_group_per_map() -> None:
    x = TensorSpec((2, Width(0, 8), 5, 5), torch.float32, torch.device("cpu"))
    weight = TensorSpec((Width(0, 8), 1, 3, 3), torch.float32, torch.device("cpu"))
    one = Operation("", aten.conv2d.default, (x, weight, None, [1, 1], [1, 1], [1, 1], 8), {})
    args, _ = one.at([3])
    assert args[6] == 3
    assert one.target(*args).shape == (2, 3, 5, 5)


def test_all_sizes_share_their_memory() -> None:
    x = TensorSpec((2, Width(0, 8)), torch.float32, torch.device("cpu"))
    one = Operation("", aten.relu.default, (x,), {})
    pointers = {one.at([n])[0][0].data_ptr() for n in (1, 5, 8)}
    assert len(pointers) == 1
    assert one.at([5])[0][0].shape == (2, 5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_indices_are_valid(dtype: torch.dtype) -> None:
    x = TensorSpec((2, 4), dtype, torch.device("cpu"))
    assert not x.tensor({}).any()
