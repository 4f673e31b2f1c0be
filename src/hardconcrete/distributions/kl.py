"""KL(q || p) of rectified gates, as the sum of three parts: at 0, at 1 and between (eq. 28).

See appendix C. The divergence of the variables before rectification is at least as large, because
rectification no longer distinguishes values below 0, or values above 1.
"""

import math

import torch
from torch import Tensor
from torch.distributions import kl as torch_kl
from torch.distributions import register_kl

from hardconcrete.distributions.hard_concrete import HardConcrete
from hardconcrete.distributions.rectified import Rectified


def kl_rectified(q: Rectified, p: Rectified) -> Tensor:
    """Eq. 28, with the middle part by deterministic quadrature."""
    return _kl_of_masses(q, p) + _middle_by_quadrature(q, p)


def kl_hard_concrete(q: HardConcrete, p: HardConcrete) -> Tensor:
    """Eq. 28, in closed form if temperature and stretch are equal."""
    closed_form = (q.low, q.high) == (p.low, p.high) and _equal_temperature(q, p)
    middle = _middle_in_closed_form(q, p) if closed_form else _middle_by_quadrature(q, p)
    return _kl_of_masses(q, p) + middle


def _kl_of_masses(q: Rectified, p: Rectified) -> Tensor:
    """The parts at exactly 0 and exactly 1."""
    closed = _expected_difference(q._log_closed, p._log_closed)
    return closed + _expected_difference(q._log_saturated, p._log_saturated)


def _expected_difference(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Q (log Q - log P): 0 where Q is 0, infinite where only P is 0."""
    impossible = log_q == -math.inf
    finite_q = torch.where(impossible, 0.0, log_q)
    return torch.where(impossible, 0.0, finite_q.exp() * (finite_q - log_p))


def _middle_by_quadrature(q: Rectified, p: Rectified) -> Tensor:
    """The integral of q(s) (log q(s) - log p(s)) over the part of (0, 1) that q reaches."""
    lower, upper = q._ends
    p_lower, p_upper = p._ends
    shape = (lower - p_lower).shape
    wide = q if q.batch_shape == shape else q.expand(shape)  # torch 2.11 cannot compile this expand
    value = wide._integrate(lambda s: _expected_difference(q._log_density(s), p._log_density(s)))
    uncovered = (lower < upper) & ((p_lower > lower) | (p_upper < upper))
    return torch.where(uncovered, math.inf, value)


def _middle_in_closed_form(q: HardConcrete, p: HardConcrete) -> Tensor:
    """The middle part if only log_alpha differs, with d = log_alpha_q - log_alpha_p.

    With w = Q(s), uniform under q, log q - log p = |d| + 2 log(1 + c v), where c = exp(-|d|) - 1
    and v is 1 - w for positive d and w for negative d. The antiderivative of log(1 + c v) is
    c v^2 h(c v) with h below, which does not overflow for any d.
    """
    distance = q.log_alpha - p.log_alpha
    positive = distance >= 0
    apart = torch.where(positive, distance, -distance)  # not abs(): its gradient is 0 at d = 0
    zero, one = q._log_odds(q._logit_zero), q._log_odds(q._logit_one)
    start = torch.sigmoid(torch.where(positive, -one, zero))
    end = torch.sigmoid(torch.where(positive, -zero, one))
    c = torch.expm1(-apart)
    integral = c * (end.square() * _h(c * end) - start.square() * _h(c * start))
    return apart * (end - start) + 2 * integral


def _h(x: Tensor) -> Tensor:
    """((1 + x) log(1 + x) - x) / x^2 for -1 <= x <= 0, by its series near 0."""
    small = x > -0.2
    series = torch.zeros_like(x)
    for k in reversed(range(24 if x.dtype == torch.float64 else 10)):
        series = series * x + (-1) ** k / ((k + 1) * (k + 2))
    away = torch.where(small, -0.5, x)
    rest = (1 + away).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.where(small, series, (rest * rest.log() - away) / away.square())


def _equal_temperature(q: HardConcrete, p: HardConcrete) -> bool:
    """Whether the temperatures are the same number or the same tensor.

    Two tensors of equal values are not enough. One of them may be learnt, and the closed form has
    no derivative with respect to one temperature.
    """
    if isinstance(q._beta, Tensor) or isinstance(p._beta, Tensor):
        return q._beta is p._beta
    return q._beta == p._beta


def _register() -> None:
    """Register the divergences with torch, and fill its cache: compiled code cannot fill it."""
    register_kl(Rectified, Rectified)(kl_rectified)
    register_kl(HardConcrete, HardConcrete)(kl_hard_concrete)
    for q in (Rectified, HardConcrete):
        for p in (Rectified, HardConcrete):
            closed_form = q is p is HardConcrete
            torch_kl._KL_MEMOIZE[q, p] = kl_hard_concrete if closed_form else kl_rectified


_register()
