"""The hard concrete distribution (section 2.2 and appendix B), computed in log space.

In the paper's notation temperature is beta and (low, high) is the stretch (gamma, zeta).
L(s) = log(s - gamma) - log(zeta - s) is the logit of s before stretching. The cdf of the stretched
variable is Q(s) = Sigmoid(beta L(s) - log_alpha) (eqs. 24 and 25).
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution, Uniform, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import AffineTransform, SigmoidTransform
from torch.nn.functional import hardtanh, logsigmoid

from hardconcrete.distributions.base import Ends
from hardconcrete.distributions.quadrature import integrate
from hardconcrete.distributions.rectified import MARGIN, Rectified
from hardconcrete.errors import ArgumentError


class HardConcrete(Rectified):
    """A binary concrete variable, stretched to (low, high) and rectified to [0, 1].

    Args:
        log_alpha: the location of each gate. A large one opens the gate, a small one closes it.
        temperature: beta; near 0 the gate is a Bernoulli variable. Pass a tensor to learn it, or to
            anneal it in compiled code, which treats a number as a constant.
        low: gamma, below 0. Stretched values below 0 become exactly 0.
        high: zeta, above 1. Stretched values above 1 become exactly 1.
        validate_args: as in ``torch.distributions``. Values are not validated inside
            ``torch.compile``, because that would break the graph.

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
        numbers = isinstance(low, int | float) and isinstance(high, int | float)
        if not numbers or not -math.inf < low < 0 < 1 < high < math.inf:
            raise ArgumentError(
                f"the stretch (low, high) = ({low}, {high}) must be finite, "
                "with low < 0 and high > 1"
            )
        low, high = float(low), float(high)
        self.log_alpha, self._beta = _alike(log_alpha, temperature)
        self.low, self.high = low, high
        shape = self.log_alpha.shape
        if isinstance(self._beta, Tensor):
            shape = torch.broadcast_tensors(self.log_alpha, self._beta)[0].shape
        self._init_shape(shape, validate_args)

    @property
    def temperature(self) -> Tensor:
        """Beta, as a tensor. A number is stored as a number, because a tensor has a device."""
        if isinstance(self._beta, Tensor):
            return self._beta
        return torch.full((), self._beta, dtype=self.log_alpha.dtype, device=self.log_alpha.device)

    def _init_shape(self, batch_shape: torch.Size, validate_args: bool | None) -> None:
        if torch.compiler.is_compiling():
            validate_args = False
        # Not the __init__ of Rectified, which needs the base: here it is built on access only.
        Distribution.__init__(self, batch_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Expand the batch shape without copying memory."""
        new: Self = self._get_checked_instance(HardConcrete, _instance)  # type: ignore[no-untyped-call]
        new.log_alpha = self.log_alpha.expand(batch_shape)
        new._beta = self._beta
        new.low, new.high = self.low, self.high
        new._init_shape(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __repr__(self) -> str:
        parameters = (("log_alpha", self.log_alpha), ("temperature", self.temperature))
        shown = [f"{name}: {p if p.numel() == 1 else p.size()}" for name, p in parameters]
        return f"HardConcrete({', '.join(shown)}, low: {self.low}, high: {self.high})"

    @classmethod
    def with_open_probability(
        cls, probability: Tensor | float, temperature: Tensor | float = 2 / 3, **stretch: Any
    ) -> Self:
        """Make a gate with this probability to be open, for example as a prior.

        Example:
            >>> import hardconcrete as hc
            >>> hc.HardConcrete.with_open_probability(0.1).open_probability
            tensor(0.1000)
        """
        probability = torch.as_tensor(probability)
        origin = cls(torch.zeros_like(probability), temperature, **stretch)
        log_alpha = torch.logit(probability) + origin._beta * origin._logit_zero
        return cls(log_alpha, temperature, **stretch)

    @property
    def base(self) -> Distribution:  # type: ignore[override]
        """The stretched binary concrete before rectification (eq. 10), as a torch distribution."""
        uniform = Uniform(torch.zeros_like(self.log_alpha), torch.ones_like(self.log_alpha))
        return TransformedDistribution(
            uniform.expand(self.batch_shape),
            [
                SigmoidTransform().inv,
                AffineTransform(self.log_alpha / self._beta, 1 / self.temperature),
                SigmoidTransform(),
                AffineTransform(self.low, self.high - self.low),
            ],
        )

    def rsample(
        self, sample_shape: Any = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """A differentiable sample, from logistic noise (eqs. 10 and 11)."""
        return self._from_logistic(self._uniform(sample_shape, generator).logit_(eps=MARGIN))

    def icdf(self, value: Tensor) -> Tensor:
        """The gate at this quantile of the noise: eqs. 10 and 11 with u = ``value``."""
        return self._from_logistic(torch.logit(value))

    def _from_logistic(self, noise: Tensor) -> Tensor:
        return self._stretched(torch.sigmoid((noise + self.log_alpha) / self._beta))

    def _stretched(self, s: Tensor) -> Tensor:
        """Stretch to (low, high), then rectify: the second part of eq. 10, and eq. 11."""
        return hardtanh(s * (self.high - self.low) + self.low, 0.0, 1.0)

    @property
    def closed_probability(self) -> Tensor:
        """P(z = 0) = Q(0) = Sigmoid(beta log(-gamma / zeta) - log_alpha)."""
        return torch.sigmoid(self._log_odds(self._logit_zero))

    @property
    def open_probability(self) -> Tensor:
        """P(z != 0) = Sigmoid(log_alpha - beta log(-gamma / zeta)), the L0 term (eq. 12)."""
        return torch.sigmoid(self.log_alpha - self._beta * self._logit_zero)

    @property
    def variance(self) -> Tensor:
        """E[(z - E z)^2] over the three parts of eq. 26."""
        mean = self.mean
        closed = self.closed_probability * mean.square()
        saturated = self._log_saturated.exp() * (1 - mean).square()
        middle = self._integrate(lambda s: (s - mean).square() * self._log_density(s).exp())
        return closed + middle + saturated

    def readout(self, rule: str) -> Tensor:
        """The gate at test time, by a named rule.

        - ``"paper"``: Sigmoid(log_alpha), stretched and rectified (eq. 13).
        - ``"median"``: Sigmoid(log_alpha / beta), stretched and rectified: the sample at the median
          of the noise.
        - ``"mean"``: E[z].
        - ``"binary"``: 1 where P(open) > 1/2, else 0.
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

    def _integrate(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Integral over (0, 1), with the substitution t = L(s) that makes the integrands smooth."""

        def substituted(t: Tensor) -> Tensor:
            s = torch.sigmoid(t) * (self.high - self.low) + self.low
            return function(s) * torch.sigmoid(t) * torch.sigmoid(-t) * (self.high - self.low)

        ends = (self._logit_zero, (self._logit_zero + self._logit_one) / 2, self._logit_one)
        return integrate(substituted, torch.stack([self._constant(end) for end in ends]))

    @property
    def _base_ends(self) -> Ends:
        return self._constant(self.low), self._constant(self.high)

    @property
    def _like(self) -> Tensor:
        return self.log_alpha

    def _log_odds(self, t: Tensor | float) -> Tensor:
        """The logit of Q where L(s) = t."""
        return self._beta * t - self.log_alpha

    def _base_cdf(self, s: Tensor) -> Tensor:
        """Q(s) = Sigmoid(beta L(s) - log_alpha) (eqs. 24 and 25)."""
        return torch.sigmoid(self._log_odds(self._logit(s)))

    def _survival(self, s: Tensor) -> Tensor:
        """1 - Q(s), exact also where it is small."""
        return torch.sigmoid(-self._log_odds(self._logit(s)))

    def _logit(self, s: Tensor) -> Tensor:
        """L(s) = log((s - low) / (high - s))."""
        return (s - self.low).log() - (self.high - s).log()

    def _log_density(self, s: Tensor) -> Tensor:
        """Log of the derivative of Q (eqs. 23 and 25)."""
        above, below = (s - self.low).log(), (self.high - s).log()
        odds = self._log_odds(above - below)
        slope = self.temperature.log() + math.log(self.high - self.low) - above - below
        return logsigmoid(odds) + logsigmoid(-odds) + slope

    def _log_tails(self, point: float) -> tuple[Tensor, Tensor]:
        odds = self._log_odds(self._logit_zero if point == 0 else self._logit_one)
        return logsigmoid(odds), logsigmoid(-odds)


def _alike(log_alpha: Tensor | float, temperature: Tensor | float) -> tuple[Tensor, Tensor | float]:
    """Tensors in one dtype, at least float32; a location that is a number joins the temperature."""
    for name, value in {"log_alpha": log_alpha, "temperature": temperature}.items():
        if not isinstance(value, Tensor | int | float):
            raise ArgumentError(f"{name} is a {type(value).__name__}, not a tensor or a number")
    tensors = [value for value in (log_alpha, temperature) if isinstance(value, Tensor)]
    dtype = torch.float32 if tensors else torch.get_default_dtype()
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not isinstance(log_alpha, Tensor):
        device = tensors[0].device if tensors else None
        log_alpha = torch.full((), log_alpha, dtype=dtype, device=device)
    if isinstance(temperature, Tensor):
        return log_alpha.to(dtype), temperature.to(dtype)
    return log_alpha.to(dtype), float(temperature)
