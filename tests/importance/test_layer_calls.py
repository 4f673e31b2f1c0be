"""Rows times the matrix are what the operator computes, for every kind of layer."""

import pytest
import torch
from torch import nn

from hardconcrete.importance.layer_calls import LayerCall
from hardconcrete.importance.parse_calls import ParameterNames, layer_call_of
from hardconcrete.importance.recording import CallInterceptor
from tests.importance.networks import KINDS, Kind

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


class LayerCalls(CallInterceptor):
    """All layers of a call, with their outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = ParameterNames(model)
        self.calls: list[tuple[LayerCall, torch.Tensor]] = []

    def intercept(self, function, args, kwargs):
        call = layer_call_of(function, args, kwargs, self.parameters)
        output = function(*args, **kwargs)
        if call is not None:
            self.calls.append((call, output))
        return output


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_times_the_matrix_are_the_results(kind: Kind) -> None:
    model, (x,) = kind.build().double(), kind.batches(1, 3)
    mode = LayerCalls(model)
    with torch.no_grad(), mode:
        model(x)
    assert mode.calls
    for call, output in mode.calls:
        matrix, index = call.matrix(), torch.randperm(call.row_count)
        rows = call.rows(index, torch.ones(matrix.shape[2], dtype=torch.bool))
        products = torch.einsum("rgi,goi->rgo", rows, matrix)
        if call.bias is not None:
            products = products + call.bias.view(matrix.shape[:2])
        expected = call.output_rows(output, index)
        assert expected.numel() == output.numel()
        assert torch.allclose(products, expected, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_matrix_is_written_where_it_was_read(kind: Kind) -> None:
    model, (x,) = kind.build().double(), kind.batches(1, 3)
    mode = LayerCalls(model)
    with torch.no_grad(), mode:
        model(x)
    with torch.no_grad():
        for call, _ in mode.calls:
            new = torch.randn_like(call.matrix())
            call.write(new)
            assert torch.equal(call.matrix(), new)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_some_columns_are_columns_of_all(kind: Kind) -> None:
    model, (x,) = kind.build().double(), kind.batches(1, 3)
    mode = LayerCalls(model)
    with torch.no_grad(), mode:
        model(x)
    for call, _ in mode.calls:
        groups, _, inputs = call.matrix().shape
        columns, index = torch.rand(inputs) < 0.5, torch.randperm(call.row_count)[:5]
        everything = call.rows(index, torch.ones(inputs, dtype=torch.bool))
        some = call.rows(index, columns)
        assert torch.equal(some, everything[:, :, columns] if groups == 1 else everything)
