"""Multiply-adds of the MNIST networks as the paper's figures count them: uncoupled.

A layer gets cheaper by its own gates only, as if what lies beyond it stayed whole; a gate counts
with its probability of being open. ``gated.expected("macs")`` counts both ends of every weight.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

Macs = Callable[[Mapping[str, Tensor]], float]


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
