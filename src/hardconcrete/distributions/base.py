"""Properties of a base distribution that rectification needs: ends, tails, dtype and device."""

import math
from functools import singledispatch

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, TransformedDistribution
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

Ends = tuple[Tensor, Tensor]


def support_ends(distribution: Distribution) -> Ends:
    """Lower and upper end of the support; infinite if it is not bounded.

    A transformed distribution declares the codomain of its last transform as its support. For an
    affine transform that is the whole line. So the ends are passed through the transforms instead.
    """
    if not _declares_codomain(distribution):
        lower, upper = _constraint_ends(distribution.support)
        return torch.as_tensor(lower), torch.as_tensor(upper)
    ends = support_ends(distribution.base_dist)  # type: ignore[attr-defined]
    for transform in distribution.transforms:  # type: ignore[attr-defined]
        ends = _carry(transform, ends)
    return ends


def interior(lower: Tensor, upper: Tensor) -> Tensor:
    """A point strictly between two ends, which may be infinite."""
    lower_known, upper_known = lower.isfinite(), upper.isfinite()
    start = torch.where(lower_known, lower, torch.where(upper_known, upper - 2, -1.0))
    end = torch.where(upper_known, upper, torch.where(lower_known, lower + 2, 1.0))
    return 0.5 * (start + end)


@singledispatch
def log_tails(base: Distribution, s: Tensor) -> tuple[Tensor, Tensor]:
    """The pair log Q(s), log(1 - Q(s)), as exact as the cdf of the base."""
    below = base.cdf(s)
    return _log(below), _log(1 - below)


@log_tails.register
def _(base: Normal, s: Tensor) -> tuple[Tensor, Tensor]:
    """For a normal base, exact also where the cdf is rounded to 0 or 1."""
    standard = (s - base.loc) / base.scale
    return torch.special.log_ndtr(standard), torch.special.log_ndtr(-standard)


def example(base: Distribution) -> Tensor:
    """An empty tensor with the dtype and device of the base. No sample is drawn."""
    if isinstance(base, TransformedDistribution):
        value = example(base.base_dist)
        for transform in base.transforms:
            value = transform(value)
        return value
    parameters = [getattr(base, name) for name in base.arg_constraints]
    first = next(value for value in parameters if isinstance(value, Tensor))
    return first.new_empty((0, *base.batch_shape))


def _declares_codomain(distribution: Distribution) -> bool:
    return (
        isinstance(distribution, TransformedDistribution)
        and type(distribution).support is TransformedDistribution.support
    )


def _constraint_ends(constraint: Constraint | None) -> tuple[Tensor | float, Tensor | float]:
    lower = getattr(constraint, "lower_bound", -math.inf)
    return lower, getattr(constraint, "upper_bound", math.inf)


def _carry(transform: Transform, ends: Ends) -> Ends:
    """Ends of the image. An end of the domain maps to an end of the codomain without rounding."""
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


def _log(probability: Tensor) -> Tensor:
    """The logarithm, which is -inf at 0 and has no NaN in its gradient there."""
    positive = probability > 0
    return torch.where(positive, torch.where(positive, probability, 1.0).log(), -math.inf)
