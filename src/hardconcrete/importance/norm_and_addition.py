"""The calls that may directly follow a layer: a batch norm, and the addition of a shortcut."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout)
"""In evaluation mode they return their input tensor itself."""

BATCH_NORM_ARGUMENTS = (
    "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
)  # fmt: skip
"""The arguments of ``F.batch_norm``, in order."""

MIN_RELATIVE_SCALE = 1e-2
"""A channel is not inverted if its scale is smaller than this fraction of the norm's largest."""


@dataclass(frozen=True, eq=False)
class BatchNormCall:
    """A call of ``F.batch_norm`` in evaluation: (x - mean) * scale + bias, for each channel.

    Example:
        >>> from torch import nn
        >>> layer, x = nn.BatchNorm1d(2).eval(), torch.randn(3, 2)
        >>> call = BatchNormCall.parse((x, layer.running_mean, layer.running_var), {})
        >>> torch.allclose(call.inverse(layer(x), 1), x)
        True
    """

    input: Tensor
    mean: Tensor
    scale: Tensor
    bias: Tensor | None

    @staticmethod
    def parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "BatchNormCall | None":
        """The call with these arguments; None if it uses the statistics of the batch."""
        values = {"eps": 1e-5, **dict(zip(BATCH_NORM_ARGUMENTS, args, strict=False)), **kwargs}
        if values.get("training") or values.get("running_mean") is None:
            return None
        scale = (values["running_var"] + values["eps"]).rsqrt()
        if values.get("weight") is not None:
            scale = scale * values["weight"]
        return BatchNormCall(values["input"], values["running_mean"], scale, values.get("bias"))

    def inverse(self, y: Tensor, dim: int) -> Tensor:
        """The x that the norm maps to y; the running mean in channels that are not invertible."""
        shape = [-1 if d == dim else 1 for d in range(y.dim())]
        reciprocal = torch.where(self.is_invertible, 1 / self.scale, 0).to(y.dtype)
        if self.bias is not None:
            y = y - self.bias.to(y.dtype).view(shape)
        return y * reciprocal.view(shape) + self.mean.to(y.dtype).view(shape)

    @property
    def is_invertible(self) -> Tensor:
        """A mask of the channels whose scale is not close to zero."""
        return self.scale.abs() > MIN_RELATIVE_SCALE * self.scale.abs().max()


def shortcut_of(args: tuple[Any, ...], kwargs: dict[str, Any], branch: Tensor) -> Tensor | None:
    """The tensor that an addition adds to a branch; None if it does more than add it.

    Example:
        >>> x, y = torch.ones(2), torch.zeros(2)
        >>> shortcut_of((x, y), {}, branch=y) is x, shortcut_of((x, y), {"alpha": 2}, branch=y)
        (True, None)
    """
    operands = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)]
    others = [operand for operand in operands if operand is not branch]
    plain = kwargs.get("alpha", 1) == 1 and kwargs.get("out") is None
    if not plain or len(operands) != 2 or len(others) != 1:
        return None
    other = others[0]
    return other if isinstance(other, Tensor) and other.is_floating_point() else None
