"""The dense layer with gates on its inputs, against F.linear(x * z, weight, bias)."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

from hardconcrete.gating.gated_linear import gated_linear

SHAPES = [(5, 4), (2, 3, 4), (2, 1, 3, 4), (4,), (0, 4)]


def plainly(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x * z, weight, bias)


def arguments(shape: tuple[int, ...] = (5, 4), bias: bool = True) -> list[Tensor | None]:
    """Gates that are between 0 and 1; float64."""
    tensors = [torch.randn(shape), torch.rand(4) * 0.9 + 0.05, torch.randn(3, 4), torch.randn(3)]
    made = [tensor.double().requires_grad_() for tensor in tensors]
    return made if bias else [*made[:3], None]


def assert_same_gradients(inputs: list[Tensor | None]) -> None:
    found, expected = gated_linear(*inputs), plainly(*inputs)
    torch.testing.assert_close(found, expected)
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if needed:
        slope = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, needed, slope), torch.autograd.grad(expected, needed, slope)
        )


def test_forward_mode() -> None:
    inputs = arguments()
    tangents = [torch.randn_like(each) for each in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(inputs, tangents, strict=True)]
        found, expected = gated_linear(*duals), plainly(*duals)
        torch.testing.assert_close(
            tuple(forward_ad.unpack_dual(found)), tuple(forward_ad.unpack_dual(expected))
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    assert_same_gradients(arguments(shape, bias))


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=4)))
def test_whatever_is_frozen(needs: tuple[bool, ...]) -> None:
    inputs = arguments()
    for tensor, need in zip(inputs, needs, strict=True):
        tensor.requires_grad_(need)
    assert_same_gradients(inputs)


@pytest.mark.parametrize("size", [1e-3, 1e-7, 1e-30])
def test_gates_that_are_almost_shut(size: float) -> None:
    inputs = [tensor.detach().float() for tensor in arguments()]
    inputs[1][0] = size
    assert_same_gradients([tensor.requires_grad_() for tensor in inputs])


def test_shut_gates_have_no_gradient_where_rectification_is_flat() -> None:
    """From the location on nothing differs: the clamp has no slope there either."""
    x, _, weight, bias = arguments()
    location = torch.tensor([-0.5, 0.3, 1.2, 0.9]).double().requires_grad_()
    slopes = [
        torch.autograd.grad(f(x, location.clamp(0, 1), weight, bias).square().sum(), location)[0]
        for f in (gated_linear, plainly)
    ]
    torch.testing.assert_close(*slopes)


def test_numerical_gradients() -> None:
    assert gradcheck(gated_linear, arguments())


def test_gradients_of_gradients() -> None:
    """As gradient penalties and Hessian products need them."""
    assert gradgradcheck(gated_linear, arguments())


def test_other_precisions() -> None:
    x, z, weight, bias = (tensor.detach().float() for tensor in arguments())
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype), z, weight.to(dtype), bias.to(dtype)]
        found = gated_linear(*inputs)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), plainly(x, z, weight, bias), rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert gated_linear(x, z, weight, bias).dtype == torch.bfloat16


def test_under_vmap() -> None:
    x, z, weight, bias = (tensor.detach() for tensor in arguments((6, 5, 4)))
    found = torch.vmap(gated_linear, in_dims=(0, None, None, None))(x, z, weight, bias)
    torch.testing.assert_close(found, plainly(x, z, weight, bias))
