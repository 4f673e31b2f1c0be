"""The contract of every rule: units match a count by hand, and removing closed ones is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from tests.exactness import apart, outputs, perturbed, with_random_gates

ROW, SEQUENCE, IMAGE = (6,), (5, 6), (3, 8, 8)
Between = Callable[[Any, Tensor], Tensor]


class Network(nn.Module):
    """Any function, with the layers, parameters and buffers that it uses."""

    def __init__(self, function: Between, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            (self.register_buffer if is_buffer else self.__setattr__)(name, part)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.dim() == 1 and tensor.is_floating_point():
                tensor.data.uniform_(0.3, 1.3)  # a wrong slice of zeros or ones would not show

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def dense(between: Between, width: int = 12, read: int = 0, **parts: Any) -> Network:
    """Between two dense layers: ``inp``, whose units are in question, and ``out``."""
    layers = {"inp": nn.Linear(6, width), "out": nn.Linear(read or width, 4)}
    return Network(lambda net, x: net.out(between(net, net.inp(x).relu())), **layers, **parts)


def conv(between: Between, width: int = 8, read: int = 0, **parts: Any) -> Network:
    """Between a convolution and a dense layer on the means of the maps."""
    layers = {"inp": nn.Conv2d(3, width, 3, padding=1), "out": nn.Linear(read or width, 4)}
    return Network(
        lambda net, x: net.out(between(net, net.inp(x).relu()).mean((2, 3))), **layers, **parts
    )


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def case(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    groups: dict[str, int],
    why: str = "",
) -> Any:
    """A network, the units in it, and words from the reason for what is fixed."""
    return pytest.param(build, shape, groups, why, id=name)


def assert_contract(
    build: Callable[[], nn.Module], shape: tuple[int, ...], groups: dict[str, int], why: str
) -> None:
    model, inputs = build(), lambda batch: ((torch.randn(batch, *shape),), {})
    gated = with_random_gates(model, inputs) if groups else None
    found = hc.find_groups(model, *inputs(2)) if gated is None else gated.analysis
    assert {group.name: group.units for group in found} == groups
    assert not why or any(why in str(entry) for entry in found.fixed), str(found)
    if gated is not None:
        assert_removable(gated.eval(), inputs(5))


def assert_removable(gated: hc.GatedModel, example: Any) -> None:
    """Parameters of closed units have no effect, and the small model without them is equal."""
    expected = outputs(gated, example)
    assert apart(expected, outputs(perturbed(gated), example)) <= 1e-5
    assert apart(expected, outputs(hc.compact(gated), example)) <= 1e-5
