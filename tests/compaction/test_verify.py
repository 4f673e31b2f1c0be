import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hardconcrete.compaction.verify import (
    RELATIVE_TOLERANCE,
    difference,
    first_difference,
    tolerance_of,
)
from tests.compaction.networks import dense


class Returns(nn.Module):
    """The input, with something done to it."""

    def __init__(self, change: object) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> object:
        return self.change(x)  # type: ignore[operator]


def compared(first: object, second: object, x: Tensor) -> float:
    return difference(Returns(first), Returns(second), ((x,), {}))


@pytest.mark.parametrize("dtype", RELATIVE_TOLERANCE)
def test_differences_are_in_units_of_what_is_tolerance_of(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -4.0]], dtype=dtype)
    size = 4 * RELATIVE_TOLERANCE[dtype]
    scaled = [lambda x: 4 * x.double() / x.double().abs().max()]
    assert compared(lambda x: x, lambda x: x, x) == 0
    for part in (0.5, 3.0):
        gap = compared(scaled[0], lambda x, part=part: scaled[0](x) + part * size, x)
        assert gap == pytest.approx(part)


def test_the_coarsest_type_counts() -> None:
    model = dense().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert tolerance_of(model, ((x,), {})) == RELATIVE_TOLERANCE[torch.float64]
    assert tolerance_of(model, ((x.float(),), {})) == RELATIVE_TOLERANCE[torch.float32]
    model[2].bfloat16()
    assert tolerance_of(model, ((x,), {})) == RELATIVE_TOLERANCE[torch.bfloat16]
    assert tolerance_of(nn.ReLU(), ((torch.tensor([1]),), {})) == 1e-5


DIFFERENT = {
    "a shape": (lambda x: x, lambda x: x[:, :1]),
    "a type": (lambda x: x, lambda x: x.double()),
    "a number of outputs": (lambda x: (x, x), lambda x: x),
    "nan": (lambda x: x, lambda x: x * math.nan),
    "infinity": (lambda x: x / 0, lambda x: x),
    "an integer": (lambda x: x.argmax(1), lambda x: x.argmax(1) + 1),
    "the second": (lambda x: {"a": x, "b": x}, lambda x: {"a": x, "b": -x}),
    "complex": (torch.view_as_complex, lambda x: torch.view_as_complex(-x)),
}


@pytest.mark.parametrize(("first", "second"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_differs(first: object, second: object) -> None:
    x = torch.tensor([[1.0, -4.0], [2.0, 3.0]])
    assert compared(first, second, x) > 1
    assert compared(first, first, x) == 0


def test_rounding_of_complex_numbers_is_tolerance_of() -> None:
    x = torch.randn(3, 2)
    assert 0 < compared(
        torch.view_as_complex, lambda x: torch.view_as_complex(x * (1 + 1e-6)), x) < 1  # fmt: skip


def test_another_batch_size_is_compared_too() -> None:
    x = torch.randn(3, 2)
    assert compared(lambda x: x, lambda x: x if len(x) == 3 else -x, x) > 1


def test_another_length_is_compared_too() -> None:
    def at_most(length: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x[:, :length] if x.shape[1] <= 5 else x.view(-1)[:0].view(2, 3)

    x = torch.randn(3, 4)
    assert compared(lambda x: x, lambda x: x if x.shape[1] != 5 else -x, x) > 1, "longer"
    assert compared(at_most(5), lambda x: x if x.shape[1] != 3 else -x, x) == 0, "longer is enough"

    def short(x: Tensor) -> Tensor:
        return x + torch.zeros(4)[: x.shape[1]]

    assert compared(short, lambda x: x if x.shape[1] != 3 else -x, x) > 1, "longer is impossible"


def test_inputs_are_not_changed() -> None:
    x = torch.randn(3, 2)
    before = x.clone()
    assert compared(lambda x: x.mul_(2), lambda x: x * 2, x) == 0
    assert torch.equal(x, before)


def test_noise_is_the_same_for_both_and_no_random_numbers_are_used_up() -> None:
    x = torch.randn(3, 2)
    state = torch.get_rng_state()
    assert compared(lambda x: x + torch.randn_like(x), lambda x: x + torch.randn_like(x), x) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_layer_that_differs_is_named() -> None:
    model, inputs = dense(), ((torch.randn(3, 4),), {})
    other = copy.deepcopy(model)
    other[2].bias.data.add_(1)
    assert first_difference(model, other, inputs) == "2 differs"
    assert "no single layer" in first_difference(model, model, inputs)


def test_a_layer_that_was_not_reached_is_named() -> None:
    model, inputs = dense(), ((torch.randn(3, 4),), {})
    other = copy.deepcopy(model)
    other[4] = nn.Linear(3, 2)
    assert first_difference(model, other, inputs) == "4 was not reached"


def test_a_graph_has_no_layers() -> None:
    model, inputs = dense(), ((torch.randn(3, 4),), {})
    assert first_difference(model, Returns(lambda x: x), inputs) == "0 was not reached"
    assert "a graph has no layers" in first_difference(model, nn.Module(), inputs)
