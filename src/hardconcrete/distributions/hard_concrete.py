"""The hard concrete distribution (section 2.2 and appendix B), in log space throughout.

In the paper's letters: log_alpha is the location, temperature is beta, (low, high) is the stretch
(gamma, zeta). L(s) = log(s - gamma) - log(zeta - s) is the logit of s before stretching, and the
cdf of the stretched variable is Q(s) = Sigmoid(beta L(s) - log_alpha) (eqs. 24 and 25).
"""

import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution, Uniform, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import AffineTransform, SigmoidTransform
from torch.distributions.utils import lazy_property
from torch.nn.functional import logsigmoid

from hardconcrete.distributions.bounds import Ends
from hardconcrete.distributions.quadrature import integrate
from hardconcrete.distributions.rectified import Rectified
from hardconcrete.errors import ArgumentError

MARGIN = 1e-6
"""Uniform noise is kept this far from 0 and 1, where its logit would be infinite."""


class HardConcrete(Rectified):
    """A binary concrete variable, stretched to (low, high) and rectified to [0, 1].

    Args:
        log_alpha: the location, one per gate; large is open, small is shut.
        temperature: beta; near 0 the gate is a Bernoulli variable. A tensor may be learnt.
        low: gamma, below 0. What the stretch carries below 0 becomes exactly 0.
        high: zeta, above 1. What the stretch carries above 1 becomes exactly 1.
        validate_args: as in ``torch.distributions``; never done inside ``torch.compile``, where
            a check of values would break the graph.

    Half precision is promoted: gates are float32 or float64.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gate = hc.HardConcrete(torch.tensor([-3.0, 0.0, 3.0]))
        >>> gate.open_probability
        tensor([0.1976, 0.8318, 0.9900])
        >>> gate.readout("paper")
        tensor([0.0000, 0.5000, 1.0000])
        >>> _ = torch.manual_seed(0)
        >>> ((gate.sample((1000,)) > 0).float().mean(0) - gate.open_probability).abs().max() < 0.05
        tensor(True)
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {
        "log_alpha": constraints.real,
        "temperature": constraints.positive,
    }
    support = constraints.unit_interval
    readouts: ClassVar[tuple[str, ...]] = ("paper", "median", "mean", "binary")

    def __init__(
        self,
        log_alpha: Tensor | float,
        temperature: Tensor | float = 2 / 3,
        low: float = -0.1,
        high: float = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        if not low < 0 < 1 < high:
            raise ArgumentError(
                f"the stretch (low, high) = ({low}, {high}) must reach beyond [0, 1]: "
                "low < 0 and high > 1"
            )
        self.log_alpha = _at_least_float32(torch.as_tensor(log_alpha))
        self.temperature = self._as_temperature(temperature)
        self.low, self.high = low, high
        shape = torch.broadcast_tensors(self.log_alpha, self.temperature)[0].shape
        self._init_shape(shape, validate_args)

    def _as_temperature(self, temperature: Tensor | float) -> Tensor:
        """A number is remembered as one: whether two are equal is then known without a tensor."""
        self._fixed_temperature: float | None = None
        if isinstance(temperature, Tensor):
            return _at_least_float32(temperature)
        self._fixed_temperature = float(temperature)
        return torch.full((), temperature, dtype=self.log_alpha.dtype, device=self.log_alpha.device)

    def _init_shape(self, batch_shape: torch.Size, validate_args: bool | None) -> None:
        if torch.compiler.is_compiling():
            validate_args = False
        # Not Rectified's: the base below is only built when it is asked for.
        Distribution.__init__(self, batch_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same gates with a larger batch shape; no memory is copied."""
        new: Self = self._get_checked_instance(HardConcrete, _instance)  # type: ignore[no-untyped-call]
        new.log_alpha = self.log_alpha.expand(batch_shape)
        new.temperature = self.temperature
        new._fixed_temperature = self._fixed_temperature
        new.low, new.high = self.low, self.high
        new._init_shape(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __repr__(self) -> str:
        return Distribution.__repr__(self)

    @lazy_property
    def base(self) -> Distribution:
        """The stretched binary concrete, before rectification (eq. 10), from torch's own parts."""
        uniform = Uniform(torch.zeros_like(self.log_alpha), torch.ones_like(self.log_alpha))
        return TransformedDistribution(
            uniform.expand(self.batch_shape),
            [
                SigmoidTransform().inv,
                AffineTransform(self.log_alpha / self.temperature, 1 / self.temperature),
                SigmoidTransform(),
                AffineTransform(self.low, self.high - self.low),
            ],
        )

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """A differentiable sample, from logistic noise (eqs. 10 and 11)."""
        uniform = torch.rand(
            self._extended_shape(sample_shape),
            dtype=self.log_alpha.dtype,
            device=self.log_alpha.device,
        )
        return self._from_logistic(uniform.logit_(eps=MARGIN))

    def icdf(self, value: Tensor) -> Tensor:
        """The gate at a quantile of the noise: eqs. 10 and 11 with u = ``value``."""
        return self._from_logistic(torch.logit(value))

    def _from_logistic(self, noise: Tensor) -> Tensor:
        return self._stretched(torch.sigmoid((noise + self.log_alpha) / self.temperature))

    def _stretched(self, s: Tensor) -> Tensor:
        """Stretch to (low, high), then rectify: the second half of eq. 10, and eq. 11."""
        return (s * (self.high - self.low) + self.low).clamp(0, 1)

    @property
    def closed_probability(self) -> Tensor:
        """P(z = 0) = Q(0) = Sigmoid(beta log(-gamma / zeta) - log_alpha)."""
        return torch.sigmoid(self._log_odds(self._logit_zero))

    @property
    def open_probability(self) -> Tensor:
        """P(z != 0) = Sigmoid(log_alpha - beta log(-gamma / zeta)), the L0 term (eq. 12)."""
        return torch.sigmoid(-self._log_odds(self._logit_zero))

    @property
    def mean(self) -> Tensor:
        """E[z]: the integral of 1 - Q(s) over (0, 1), taken over t = L(s), where it is smooth."""

        def survival(t: Tensor) -> Tensor:
            slope = torch.sigmoid(t) * torch.sigmoid(-t) * (self.high - self.low)
            return torch.sigmoid(-self._log_odds(t)) * slope

        return integrate(survival, *self._logit_ends)

    @property
    def variance(self) -> Tensor:
        """E[(z - E z)^2] over the three parts of eq. 26, the middle one over t = L(s)."""
        mean = self.mean

        def middle(t: Tensor) -> Tensor:
            s = torch.sigmoid(t) * (self.high - self.low) + self.low
            odds = self._log_odds(t)
            density = torch.sigmoid(odds) * torch.sigmoid(-odds) * self.temperature
            return (s - mean).square() * density

        shut = self.closed_probability * mean.square()
        saturated = self._log_saturated.exp() * (1 - mean).square()
        return shut + integrate(middle, *self._logit_ends) + saturated

    def readout(self, rule: str) -> Tensor:
        """The gate at test time, by a named rule.

        ``"paper"`` is Sigmoid(log_alpha), stretched and rectified (eq. 13); ``"median"`` is
        Sigmoid(log_alpha / beta), stretched and rectified, the sample at the median of the noise;
        ``"mean"`` is E[z]; ``"binary"`` is 1 where P(open) > 1/2 and else 0.
        """
        if rule == "paper":
            return self._stretched(torch.sigmoid(self.log_alpha)).expand(self.batch_shape)
        return super().readout(rule)

    @property
    def _logit_zero(self) -> float:
        """L(0) = log(-gamma / zeta)."""
        return math.log(-self.low / self.high)

    @property
    def _logit_one(self) -> float:
        """L(1) = log((1 - gamma) / (zeta - 1))."""
        return math.log((1 - self.low) / (self.high - 1))

    @property
    def _logit_ends(self) -> Ends:
        return self._constant(self._logit_zero), self._constant(self._logit_one)

    @property
    def _base_ends(self) -> Ends:
        return self._constant(self.low), self._constant(self.high)

    @property
    def _like(self) -> Tensor:
        return self.log_alpha

    def _log_odds(self, t: Tensor | float) -> Tensor:
        """The logit of Q where L(s) = t."""
        return self.temperature * t - self.log_alpha

    def _base_cdf(self, s: Tensor) -> Tensor:
        """Q(s) = Sigmoid(beta L(s) - log_alpha) (eqs. 24 and 25)."""
        return torch.sigmoid(self._log_odds((s - self.low).log() - (self.high - s).log()))

    def _log_density(self, s: Tensor) -> Tensor:
        """Log of the derivative of Q (eqs. 23 and 25)."""
        above, below = (s - self.low).log(), (self.high - s).log()
        odds = self._log_odds(above - below)
        slope = self.temperature.log() + math.log(self.high - self.low) - above - below
        return logsigmoid(odds) + logsigmoid(-odds) + slope

    @property
    def _log_closed(self) -> Tensor:
        return logsigmoid(self._log_odds(self._logit_zero))

    @property
    def _log_saturated(self) -> Tensor:
        return logsigmoid(-self._log_odds(self._logit_one))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
