"""Slow reference implementations."""

import math
from collections.abc import Callable

import torch
from scipy.integrate import quad
from torch import Tensor
from torch.distributions import Distribution

DEVIATIONS = 5.5
"""Allowed distance of a sample average in standard errors: one comparison in 26 million fails."""


def integral(function: Callable[[Tensor], Tensor], lower: float = 0.0, upper: float = 1.0) -> float:
    """Adaptive integration of a function of one float64 number."""
    value, _ = quad(
        lambda s: function(torch.tensor(s, dtype=torch.float64)).item(),
        lower,
        upper,
        epsabs=1e-13,
        epsrel=1e-12,
        limit=400,
    )
    return value


def assert_average(samples: Tensor, expected: Tensor) -> None:
    """The average over the first dimension agrees with its expectation."""
    error = samples.std(0) / math.sqrt(len(samples))
    distance = (samples.mean(0) - expected).abs()
    assert (distance <= DEVIATIONS * error + 1e-7).all(), (samples.mean(0), expected, error)


def divergence(q: Distribution, p: Distribution) -> float:
    """KL of two rectified gates from their log_prob alone: two masses and an integral (eq. 28)."""
    total = 0.0
    for end in (0.0, 1.0):
        log_q = q.log_prob(torch.tensor(end, dtype=torch.float64))
        log_p = p.log_prob(torch.tensor(end, dtype=torch.float64))
        if log_q > -math.inf:
            total += (log_q.exp() * (log_q - log_p)).item()
    return total + integral(lambda s: q.log_prob(s).exp() * (q.log_prob(s) - p.log_prob(s)))
