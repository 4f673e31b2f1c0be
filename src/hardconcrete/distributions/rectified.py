"""Rectified distributions (section 2.1): a continuous variable, clamped to [0, 1]."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution, constraints
from torch.distributions.constraints import Constraint

from hardconcrete.distributions.base import Ends, example, interior, log_tails, support_ends
from hardconcrete.distributions.quadrature import integrate
from hardconcrete.errors import ArgumentError

MARGIN = 1e-6
"""Uniform noise is at least this far from 0 and 1, where quantiles can be infinite."""

LEVELS = (1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6)
"""Integrals are divided at these quantiles of the base, so that narrow and wide bases are resolved
equally well. For a base without an icdf they are divided at these fractions of its interval."""


class Rectified(Distribution):
    """z = min(1, max(0, s)) with s from ``base`` (eqs. 4 and 5).

    The mass of the base below 0 moves to exactly 0, and the mass above 1 to exactly 1 (eq. 26). So
    z is a gate that can be closed, with a gradient through the values between 0 and 1.

    Args:
        base: a scalar, continuous, reparameterizable distribution with a ``cdf``, over the reals
            or an interval. Its batch shape is the shape of the gates. Moments and divergences are
            integrated numerically, to about 1e-9 if the base has an ``icdf`` and a smooth density.
            Without an ``icdf`` some 200 fixed nodes are used.
        validate_args: as in ``torch.distributions``.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gate = hc.Rectified(torch.distributions.Normal(torch.tensor([-1.0, 0.5]), 1.0))
        >>> gate.open_probability
        tensor([0.1587, 0.6915])
        >>> gate.log_prob(torch.zeros(2)).exp()     # the mass at exactly zero
        tensor([0.8413, 0.3085])
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}
    has_rsample = True
    readouts: ClassVar[tuple[str, ...]] = ("median", "mean", "binary")

    def __init__(self, base: Distribution, validate_args: bool | None = None) -> None:
        _refuse_unusable(base)
        self.base = base
        super().__init__(base.batch_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Expand the batch shape without copying memory."""
        new: Self = self._get_checked_instance(Rectified, _instance)  # type: ignore[no-untyped-call]
        new.base = self.base.expand(torch.Size(batch_shape))
        Distribution.__init__(new, torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base})"

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> Constraint:
        """The unit interval, or the part of it that the base reaches."""
        return constraints.interval(*self._ends)

    def rsample(
        self, sample_shape: Any = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """A differentiable sample of the base, rectified (eq. 5).

        With a ``generator`` the sample is computed by the ``icdf`` of the base.
        """
        if generator is None:
            return self.base.rsample(sample_shape).clamp(0, 1)
        return self.icdf(self._uniform(sample_shape, generator).clamp_(MARGIN, 1 - MARGIN))

    def _uniform(self, sample_shape: Any, generator: torch.Generator | None) -> Tensor:
        shape, like = self._extended_shape(sample_shape), self._like
        options: Any = {"dtype": like.dtype, "device": like.device}
        if generator is not None:  # with dynamic shapes, torch.compile rejects generator=None
            options["generator"] = generator
        uniform: Tensor = torch.rand(shape, **options)
        return uniform

    @property
    def closed_probability(self) -> Tensor:
        """P(z = 0) = Q(0), the probability that the gate is closed."""
        return self._log_closed.exp()

    @property
    def open_probability(self) -> Tensor:
        """P(z != 0) = 1 - Q(0), the term of the L0 penalty (eq. 6)."""
        return self._log_tails(0.0)[1].exp()

    def cdf(self, value: Tensor) -> Tensor:
        """P(z <= value): 0 below 0, the cdf of the base below 1, and 1 from there on."""
        if self._validate_args:
            self._validate_sample(value)
        inside = self._base_cdf(value.clamp(0, 1))
        return torch.where(value < 0, 0.0, torch.where(value >= 1, 1.0, inside))

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z whose cdf reaches ``value``; needs a base with an ``icdf``."""
        return self._base_icdf(value).clamp(0, 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log mass at exactly 0 and 1, log density between them (eq. 26)."""
        if self._validate_args:
            self._validate_sample(value)
        between = (value > 0) & (value < 1)
        density = self._log_density(torch.where(between, value, 0.5))
        mass = torch.where(value == 0, self._log_closed, self._log_saturated)
        outside = torch.where(value.isnan(), math.nan, -math.inf)
        on_mass = (value == 0) | (value == 1)
        return torch.where(between, density, torch.where(on_mass, mass, outside))

    @property
    def mean(self) -> Tensor:
        """E[z], the integral of 1 - Q(s) over (0, 1)."""
        return (self._ends[0] + self._integrate(self._survival)).clamp(0, 1)

    @property
    def variance(self) -> Tensor:
        """E[(z - E z)^2], from the integral of 2 (s - E z)(1 - Q(s)) over (0, 1)."""
        mean = self.mean
        tail = self._integrate(lambda s: 2 * (s - mean) * self._survival(s))
        return ((self._ends[0] - mean).square() + tail).clamp_min(0)

    def readout(self, rule: str) -> Tensor:
        """The gate at test time, by a named rule.

        - ``"median"``: the gate at the median of the noise.
        - ``"mean"``: E[z].
        - ``"binary"``: 1 where P(open) > 1/2, else 0.

        A ``HardConcrete`` also has ``"paper"``.
        """
        if rule not in self.readouts:
            known = ", ".join(map(repr, self.readouts))
            raise ArgumentError(
                f"readout {rule!r} is not known to {type(self).__name__}; use one of {known}"
            )
        if rule == "median":
            return self.icdf(self._constant(0.5))
        if rule == "mean":
            return self.mean
        return (self.open_probability > 0.5).to(self._like.dtype)

    # The formulas above and the divergence use the methods below; HardConcrete overrides them with
    # closed forms.

    @property
    def _base_ends(self) -> Ends:
        lower, upper = (end.to(self._like) for end in support_ends(self.base))
        return lower.expand(self.batch_shape), upper.expand(self.batch_shape)

    @property
    def _ends(self) -> Ends:
        """The ends of the part of [0, 1] that the base reaches."""
        lower, upper = self._base_ends
        return lower.clamp(0, 1), upper.clamp(0, 1)

    def _integrate(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Integral over the part of (0, 1) that the base reaches, divided at its quantiles."""
        lower, upper = self._ends
        with torch.no_grad():
            levels = torch.stack([self._constant(level) for level in LEVELS])
            try:
                inner = self.base.icdf(levels)
            except NotImplementedError:
                inner = lower + (upper - lower) * levels
        inner = torch.maximum(torch.minimum(inner, upper), lower)
        return integrate(function, torch.cat([lower[None], inner, upper[None]]))

    def _base_icdf(self, value: Tensor) -> Tensor:
        try:
            return self.base.icdf(value)
        except NotImplementedError as error:
            raise ArgumentError(
                f"quantiles of {self} need a base with an icdf; {type(self.base).__name__} has none"
            ) from error

    def _base_cdf(self, s: Tensor) -> Tensor:
        """Q(s), also for s outside the support of the base."""
        lower, upper = self._base_ends
        inside = (s > lower) & (s < upper)
        value = self.base.cdf(torch.where(inside, s, interior(lower, upper)))
        return torch.where(inside, value, (s >= upper).to(value))

    def _survival(self, s: Tensor) -> Tensor:
        """1 - Q(s)."""
        return 1 - self._base_cdf(s)

    def _log_density(self, s: Tensor) -> Tensor:
        """Log density of the base, also for s outside its support."""
        lower, upper = self._base_ends
        inside = (s >= lower) & (s <= upper)
        value = self.base.log_prob(torch.where(inside, s, interior(lower, upper)))
        return torch.where(inside, value, -math.inf)

    def _log_tails(self, point: float) -> tuple[Tensor, Tensor]:
        """The pair log Q(point), log(1 - Q(point)), also for points outside the support."""
        lower, upper = self._base_ends
        inside = (lower < point) & (upper > point)
        below, above = log_tails(self.base, torch.where(inside, point, interior(lower, upper)))
        all_below = upper <= point
        certainly_below = torch.where(all_below, 0.0, -math.inf).to(below)
        certainly_above = torch.where(all_below, -math.inf, 0.0).to(above)
        return torch.where(inside, below, certainly_below), torch.where(
            inside, above, certainly_above
        )

    @property
    def _log_closed(self) -> Tensor:
        """Log P(z = 0)."""
        return self._log_tails(0.0)[0]

    @property
    def _log_saturated(self) -> Tensor:
        """Log P(z = 1)."""
        return self._log_tails(1.0)[1]

    @property
    def _like(self) -> Tensor:
        """A tensor with the dtype and device of the gates."""
        return example(self.base)

    def _constant(self, value: float) -> Tensor:
        return torch.full(self.batch_shape, value, dtype=self._like.dtype, device=self._like.device)


def _refuse_unusable(base: Distribution) -> None:
    name = type(base).__name__
    if not isinstance(base, Distribution):
        raise ArgumentError(f"Rectified needs a torch.distributions.Distribution, not {name}")
    if base.event_shape:
        raise ArgumentError(
            f"Rectified needs a scalar base, one variable per gate; {name} has event shape "
            f"{tuple(base.event_shape)}: put the gates into its batch shape"
        )
    if isinstance(base, Rectified):
        raise ArgumentError(f"{name} is rectified already: rectify its base")
    if not base.has_rsample:
        raise ArgumentError(
            f"Rectified needs a continuous base with rsample, for a gradient; {name} has none"
        )
    core = base
    while type(core).cdf is TransformedDistribution.cdf:
        if not all(transform.bijective for transform in core.transforms):  # type: ignore[attr-defined]
            raise ArgumentError(
                f"Rectified needs a base with a cdf; the cdf of {name} is unknown after abs"
            )
        core = core.base_dist  # type: ignore[attr-defined]
    if type(core).cdf is Distribution.cdf:
        raise ArgumentError(
            f"Rectified needs a base with a cdf, for P(open) = 1 - Q(0); "
            f"{type(core).__name__} has none"
        )
