"""A dense layer with gates on its inputs, whose gate gradients cost no matrix product.

z acts only through x * z, so the gradient of each gate follows from one that is computed anyway:
dL/dz = sum(x * dL/d(x z)). In a first layer x needs no gradient; there z dL/dz = sum(W * dL/dW) is
divided by z. Closed gates then get no gradient, which is right: the rectification of eq. 5 is flat.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hardconcrete.gating.compilation import in_graph
from hardconcrete.gating.products import is_transformed

MIN_DIVISOR = 1e-30
"""Replaces z = 0, where the numerator is 0 as well."""


@in_graph
def gated_linear(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(x * z, weight, bias)."""
    plain = x.dim() > 1 and x.dtype == z.dtype == weight.dtype
    if not plain or is_transformed() or torch.is_autocast_enabled(x.device.type):
        return F.linear(x * z.to(x.dtype), weight, bias)
    result: Tensor = _GatedLinear.apply(x, z, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x, z, weight)  # and not the product, which is as large as x
        return F.linear(x * z, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, z, weight = ctx.saved_tensors
        gated = x * z
        of_x, of_z, of_weight, of_bias = ctx.needs_input_grad
        (dy,) = gradients
        rows, inputs = dy.flatten(0, -2), gated.flatten(0, -2)
        dw = rows.t() @ inputs if of_weight else None
        dgated = dy @ weight if of_x or dw is None else None
        dz = None
        if of_z and dgated is not None:
            dz = (x * dgated).flatten(0, -2).sum(0)
        elif of_z:
            dz = (weight * dw).sum(0) / z.clamp_min(MIN_DIVISOR)
        dx = dgated * z if of_x else None
        return dx, dz, dw, rows.sum(0) if of_bias else None
