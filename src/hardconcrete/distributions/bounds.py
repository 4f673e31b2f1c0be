"""The interval a scalar distribution lives on."""

import math

import torch
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

Ends = tuple[Tensor, Tensor]


def support_ends(distribution: Distribution) -> Ends:
    """Lower and upper end of the support, infinite where it is not bounded.

    A transformed distribution declares the codomain of its last transform, which for an affine
    one is the whole line; here the ends are carried through the transforms instead.
    """
    if not isinstance(distribution, TransformedDistribution):
        lower, upper = _constraint_ends(distribution.support)
        return torch.as_tensor(lower), torch.as_tensor(upper)
    ends = support_ends(distribution.base_dist)
    for transform in distribution.transforms:
        ends = _carry(transform, ends)
    return ends


def interior(lower: Tensor, upper: Tensor) -> Tensor:
    """Some point strictly between two ends, either of which may be infinite."""
    lower_known, upper_known = lower.isfinite(), upper.isfinite()
    start = torch.where(lower_known, lower, torch.where(upper_known, upper - 2, -1.0))
    end = torch.where(upper_known, upper, torch.where(lower_known, lower + 2, 1.0))
    return 0.5 * (start + end)


def _constraint_ends(constraint: Constraint | None) -> tuple[Tensor | float, Tensor | float]:
    lower = getattr(constraint, "lower_bound", -math.inf)
    return lower, getattr(constraint, "upper_bound", math.inf)


def _carry(transform: Transform, ends: Ends) -> Ends:
    """Ends of the image: an end of the domain goes to an end of the codomain, never rounded."""
    domain = [torch.as_tensor(end) for end in _constraint_ends(transform.domain)]
    codomain = [torch.as_tensor(end) for end in _constraint_ends(transform.codomain)]
    falling = torch.as_tensor(transform.sign) < 0
    inside = interior(*domain)
    images = []
    for end, edge, rising_limit, falling_limit in zip(
        ends, domain, codomain, reversed(codomain), strict=True
    ):
        limit = torch.where(falling, falling_limit, rising_limit)
        at_edge = end == edge
        images.append(torch.where(at_edge, limit, transform(torch.where(at_edge, inside, end))))
    return torch.minimum(*images), torch.maximum(*images)
