"""Noise of weights as noise of outputs: the local reparametrisation trick."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def noise_key(name: str) -> str:
    """The name of a parameter as a key: names of parameters of torch have no dots."""
    return name.replace(".", "/")


def log_variances(
    parameters: Mapping[str, Tensor], start: float, device: torch.device
) -> nn.ParameterDict:
    """The log-variances of the noise of these parameters, by their first names.

    Example:
        >>> log_variances({"0.weight": torch.zeros(2)}, -9.0, torch.device("cpu"))["0/weight"].data
        tensor([-9., -9.])
    """
    return nn.ParameterDict(
        {
            noise_key(name): nn.Parameter(torch.full(parameter.shape, start, device=device))
            for name, parameter in parameters.items()
        }
    )


MIN_VARIANCE = 1e-12
"""The root has no finite slope at 0."""


def output_noise(
    x: Tensor, variance: Tensor, of_bias: Tensor | None, layer: Callable[..., Tensor]
) -> Tensor:
    """A draw of what independent Gaussian noise of the weights adds to the output of a layer.

    Each example has its own draw, so gradients vary less than with one draw of the weights
    (Kingma, Salimans, Welling 2015, eq. 6).

    Args:
        x: the input of the layer.
        variance: of each weight.
        of_bias: of the bias, if it has noise.
        layer: computes the layer from input, weight and bias.

    Example:
        >>> x, variance = torch.ones(2, 3), torch.tensor([[1.0, 4.0, 4.0]])
        >>> noise = [output_noise(x, variance, None, torch.nn.functional.linear) for _ in range(9)]
        >>> torch.stack(noise).shape               # their deviation is 3
        torch.Size([9, 2, 1])
    """
    variance = variance.to(x.dtype)
    of_bias = None if of_bias is None else of_bias.to(x.dtype)
    deviation = layer(x.square(), variance, of_bias).clamp_min(MIN_VARIANCE).sqrt()
    return deviation * torch.randn_like(deviation)
