"""The paper's initialisation."""

from torch import nn


def initialise(model: nn.Module) -> None:
    """He-normal weights, by the number of inputs, and zero biases, as in the paper's code."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
