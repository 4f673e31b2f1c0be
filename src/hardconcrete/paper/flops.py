"""Multiply-adds of the MNIST networks, by the probability that each unit is alive.

A multiply-add counts when both its ends are alive, so the expectations are products over
independent gates; with probabilities of 0 and 1 they are the counts of the network that is left.
The paper's figures count two operations per multiply-add, and uncoupled: a layer gets cheaper by
its own gates only, as if what lies beyond it stayed whole.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

Macs = Callable[[Mapping[str, Tensor]], float]


def mlp_macs(alive: Mapping[str, Tensor]) -> float:
    """Of the MLP with gates on the inputs of its three layers.

    Example:
        >>> import torch
        >>> sizes = {"fc1:in": 784, "fc2:in": 300, "fc3:in": 100}
        >>> mlp_macs({name: torch.ones(size) for name, size in sizes.items()})
        266200.0
    """
    first, second, third = (
        alive[name].double().sum().item() for name in ("fc1:in", "fc2:in", "fc3:in")
    )
    return first * second + second * third + third * 10


def lenet5_macs(alive: Mapping[str, Tensor]) -> float:
    """Of LeNet-5 with gates on both convolutions' maps and both dense layers' inputs.

    An input of fc1 is alive when its own gate and that of its map are open; a map is alive when its
    gate and one of its 16 inputs of fc1 are open.

    Example:
        >>> import torch
        >>> sizes = {"conv1:out": 20, "conv2:out": 50, "fc1:in": 800, "fc2:in": 500}
        >>> lenet5_macs({name: torch.ones(size) for name, size in sizes.items()})
        2293000.0
    """
    maps = alive["conv2:out"].double()
    inputs = alive["fc1:in"].double().view(50, 16)
    needed = maps * (1 - (1 - inputs).prod(1))
    flat = (maps[:, None] * inputs).sum().item()
    first, hidden = alive["conv1:out"].double().sum().item(), alive["fc2:in"].double().sum().item()
    convolutions = 24 * 24 * 25 * first + 8 * 8 * 25 * first * needed.sum().item()
    return convolutions + flat * hidden + hidden * 10


def mlp_uncoupled_macs(alive: Mapping[str, Tensor]) -> float:
    """Of the MLP as the paper counts: every layer has all its outputs.

    Example:
        >>> import torch
        >>> sizes = {"fc1:in": 784, "fc2:in": 300, "fc3:in": 100}
        >>> mlp_uncoupled_macs({name: torch.ones(size) / 2 for name, size in sizes.items()})
        133100.0
    """
    return sum(
        outputs * alive[name].double().sum().item()
        for name, outputs in (("fc1:in", 300), ("fc2:in", 100), ("fc3:in", 10))
    )


def lenet5_uncoupled_macs(alive: Mapping[str, Tensor]) -> float:
    """Of LeNet-5 as the paper counts: convolutions have all their inputs, dense layers all outputs.

    Example:
        >>> import torch
        >>> sizes = {"conv1:out": 20, "conv2:out": 50, "fc1:in": 800, "fc2:in": 500}
        >>> lenet5_uncoupled_macs({name: torch.ones(size) / 2 for name, size in sizes.items()})
        1146500.0
    """
    per_unit = {
        "conv1:out": 24 * 24 * 25,
        "conv2:out": 8 * 8 * 25 * 20,
        "fc1:in": 500,
        "fc2:in": 10,
    }
    return sum(macs * alive[name].double().sum().item() for name, macs in per_unit.items())
