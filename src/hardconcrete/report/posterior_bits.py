"""How many bits the weights need, by the variances of their posterior."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.folding import gate_masks
from hardconcrete.gating.weight_noise import noise_key

FULL = 32
"""Bits of a parameter without a posterior."""


@dataclass(frozen=True)
class PosteriorBits:
    """Bits by layer, and the compression that they give.

    Args:
        bits: of each weight of a parameter, by its name.
        rate: bits of the dense model in float32 over bits of the small one.
    """

    bits: Mapping[str, int]
    rate: float

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {bits}" for name, bits in self.bits.items())
        return f"bits: {listed}; {self.rate:.1f} times smaller than in float32"


@torch.no_grad()
def posterior_bits(gated: GatedModel, small: nn.Module) -> PosteriorBits:
    """The bits that each layer needs: its rounding error is below the deviation of its weights.

    Louizos et al. 2017 choose the precision of a layer by the mean posterior variance of its
    weights. Here they lie on a grid of 2^bits - 1 points from -max |w| to max |w|, whose rounding
    error is at most the root of that mean, over the units that stay.

    Args:
        gated: a model with ``method="gnj"``, ``"ghs"`` or ``"sparse-vd"``, trained.
        small: what ``compact(gated)`` made of it.

    Example:
        >>> import hardconcrete as hc
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), method="gnj")
        >>> [*posterior_bits(gated, hc.compact(gated)).bits]       # other parameters have 32
        ['2.weight']
    """
    if gated.gates.log_variances is None:
        raise ArgumentError(
            f"{type(gated.gates.family).__name__} gates leave the weights without a posterior: "
            "attach them with method='gnj', 'ghs' or 'sparse-vd'"
        )
    bits = {}
    for name, (mean, variance) in posterior(gated).items():
        if len(mean):
            levels = 2 * mean.abs().max().item() / (2 * variance.mean().sqrt().item()) + 1
            bits[name] = math.ceil(math.log2(levels + 1))
    dense = FULL * sum(value.numel() for value in gated.model.parameters())
    left = sum(bits.get(name, FULL) * value.numel() for name, value in small.named_parameters())
    return PosteriorBits(bits, dense / left)


def posterior(gated: GatedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of the weights z v of open units, where z and v are independent."""
    bank, noise = gated.gates, gated.gates.log_variances
    parameters, mean = bank.gate_parameters(), bank.mean()
    second = mean.square() + bank.family.variance(parameters)
    masks = [gate_masks(gated, gated.model, v) for v in (mean, second, bank.is_open().float())]
    found = {}
    for name, weight in gated.model.named_parameters():
        if noise is not None and noise_key(name) in noise:
            of_z, of_z2, is_open = (mask[name].expand_as(weight) for mask in masks)
            stays = is_open > 0
            z, z2, v = of_z[stays], of_z2[stays], weight.float()[stays]
            variance = z2 * (noise[noise_key(name)].exp()[stays] + v.square()) - (z * v).square()
            found[name] = z * v, variance
    return found
