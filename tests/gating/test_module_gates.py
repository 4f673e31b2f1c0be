from collections.abc import Callable

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import GateError
from tests.gating.networks import Scale, SelfAttention, Tied
from tests.gating.oracles import (
    assert_as_by_hand,
    gradients,
    multiplied,
    next_draw,
    spread,
)

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("make", "sites", "shape"),
    [
        (nn.LayerNorm, [hc.Site(("weight", "bias"), 0)], (3, 4)),
        (nn.BatchNorm1d, [hc.Site("weight", 0)], (8, 4)),
        (Scale, [hc.Site("used", 0)], (3, 4)),
        (Scale, [hc.Site("used", None)], (3, 4)),
        (lambda units: nn.GRUCell(units, 3), [hc.Site("weight_ih", 1)], (5, 4)),
        (
            lambda _: SelfAttention(),
            [
                hc.Site("attention.in_proj_weight", 1),
                hc.Site("attention.out_proj.weight", 1),
                hc.Site("attention.out_proj.bias", 0),
            ],
            (2, 3, 4),
        ),
    ],
    ids=["LayerNorm", "BatchNorm", "own class", "own class, each", "GRUCell", "attention"],
)
def test_modules_that_read_their_parameters(
    make: Callable[[int], nn.Module], sites: list[hc.Site | str], shape: Shape
) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_as_by_hand(make(4).double(), sites, x)


def test_embeddings() -> None:
    model = nn.Embedding(7, 4)
    assert_as_by_hand(model, [hc.Site("weight", 1)], torch.tensor([[0, 3], [6, 6]]))


@pytest.mark.parametrize("site", ["first:in", "second:in"])
def test_tied_weights_are_gated_under_both_names(site: str) -> None:
    model = Tied()
    gated = spread(hc.attach_gates(model, torch.zeros(2, 4), sites=[site]))
    x = torch.randn(3, 4)
    z = next_draw(gated)
    weight = multiplied(model.first._parameters["weight"], 1, z)
    torch.testing.assert_close(gated(x), torch.tanh(x @ weight.T) @ weight.T)
    assert model.first._parameters["weight"] is model.second._parameters["weight"]
    assert len(list(gated.parameters())) == 2


def test_a_module_used_twice_sees_one_draw() -> None:
    layer = nn.Linear(4, 4, bias=False)
    gated = spread(hc.attach_gates(nn.Sequential(layer, layer), torch.zeros(2, 4), sites=["0:in"]))
    x = torch.randn(3, 4)
    weight = multiplied(layer._parameters["weight"], 1, next_draw(gated))
    torch.testing.assert_close(gated(x), x @ weight.T @ weight.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [2, 60])
def test_gates_are_float32_whatever_the_model_is(dtype: torch.dtype, batch: int) -> None:
    model = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3)).to(dtype)
    gated = hc.attach_gates(model, torch.zeros(2, 12).to(dtype), sites=["0:out", "1:in"])
    found = gated(torch.randn(batch, 12, dtype=dtype, requires_grad=True))
    assert found.dtype == dtype
    assert gated.gates.log_alpha.dtype == torch.float32
    assert gradients(found.sum(), gated.gates)[0].dtype == torch.float32


def test_a_gate_per_example_cannot_multiply_a_parameter() -> None:
    """Attention reads the weight of a dense layer itself."""
    gated = hc.attach_gates(
        SelfAttention(),
        torch.zeros(2, 3, 4),
        sites=["attention.out_proj:in"],
        sample="example",
    )
    with pytest.raises(GateError, match="and weight was read as a parameter; use sample='batch'"):
        gated(torch.zeros(2, 3, 4))
