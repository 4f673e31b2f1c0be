"""The expected L0 norm, with L2 (section 2.3) and the variational bound (appendix A)."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hardconcrete.distributions import Rectified
from hardconcrete.errors import ArgumentError
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.gating.groups import per_group, without_gates
from hardconcrete.objective.budget import refuse_measured_gates
from hardconcrete.sparsifiers import GateParameters
from hardconcrete.units.group import raw_parameter

Lam = float | str | Mapping[str, float]
LamSchedule = Callable[[int], float | Mapping[str, float]]


class L0Penalty:
    """The complexity loss of the paper, to be added to a mean loss in nats.

    A call gives the sum over gates of P(open) * (lam * |g| + weight_decay / 2 * ||theta_g||^2)
    + KL(q(z) || p(z)) / examples (eqs. 16, 17 and 21), differentiable in gates and weights. Weights
    without a gate, in a parameter that has gates, decay as if their gate were open. Weights under
    gates of two sites, on inputs and on outputs, decay once for each.

    Args:
        gated: the model.
        lam: the paper's lambda, 1/N included: a number, a mapping by group name ("lambda sep."),
            ``"aic"`` (1/N) or ``"bic"`` (ln N / 2N), which need ``examples``; or a schedule, a
            function from the number of ``step()`` calls so far to a number or mapping.
        cost: the meaning of |g|. ``"group_size"`` is the number of weights that a gate of a named
            site multiplies, as in the paper. For traced units it is all parameters of one unit.
        weight_decay: coefficient of the expected L2 norm of the gated weights (eq. 17).
        prior: p(z), a ``Rectified`` for all gates; the result is then the bound of appendix A.
        examples: N, the number of training examples.
        decay_moves_gates: False keeps the L2 term from closing gates: only weights have its
            gradient.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> penalty = hc.L0Penalty(gated, lam=0.1 / 60_000)
        >>> loss = gated(torch.ones(2, 4)).square().mean() + penalty()
        >>> loss.backward()
        >>> gated.gates.log_alpha.grad.shape
        torch.Size([4])
        >>> warm = hc.L0Penalty(gated, lam=lambda step: 1e-4 * min(1, step / 1000))
        >>> warm().item()
        0.0
        >>> warm.step()                         # after each step of the optimizer
    """

    def __init__(
        self,
        gated: GatedModel,
        lam: Lam | LamSchedule,
        *,
        cost: str = "group_size",
        weight_decay: float = 0.0,
        prior: Rectified | None = None,
        examples: int | None = None,
        decay_moves_gates: bool = True,
    ) -> None:
        _check_arguments(gated, cost, weight_decay, prior, examples)
        self.gated = gated
        self.schedule = _as_schedule(lam, examples)
        self.weight_decay = weight_decay
        self.prior: Rectified | None = None  # set below: ``_update`` refuses a prior of other gates
        self.examples = examples or 0
        self.decay_moves_gates = decay_moves_gates
        self.steps = 0
        self.prices, self._priced = torch.empty(0), dict[str, float]()
        self._free: dict[str, dict[int, Tensor]] = {}
        self._update()
        if prior is not None:
            gated.gates.family.refuse_prior(gated.gates.gate_parameters(), prior)
        self.prior = prior
        if weight_decay:
            self._refuse_second_decay()
            gated.decay.penalties.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copy with the model that was copied with it."""
        self.__dict__.update(state)
        if self.weight_decay:
            self.gated.decay.penalties.add(self)

    def __call__(self) -> Tensor:
        """The penalty for the present gates and weights."""
        refuse_measured_gates(self.gated, "an L0Penalty")
        bank = self.gated.gates
        return self._sum(bank.open_probability(), bank.gate_parameters)

    def of(self, parameters: GateParameters) -> Tensor:
        """The penalty if the gates had these parameters."""
        family = self.gated.gates.family
        return self._sum(family.open_probability(parameters), lambda: parameters)

    def _sum(self, probability: Tensor, parameters: Callable[[], GateParameters]) -> Tensor:
        if len(self.prices) != self.gated.gates.count:  # units were removed meanwhile
            self._update()
        total = (probability * self.prices.to(probability.device)).sum()
        if self.weight_decay:
            weights = probability if self.decay_moves_gates else probability.detach()
            squares = (weights * self.squared_norms()).sum() + self._squares_without_gates()
            total = total + 0.5 * self.weight_decay * squares
        if self.prior is not None:
            divergence = self.gated.gates.family.divergence(parameters(), self.prior)
            total = total + divergence.sum() / self.examples
        return total

    def step(self) -> None:
        """Advance the schedule of lambda. A constant lambda needs no steps."""
        self.steps += 1
        self._update()

    @property
    def lam(self) -> dict[str, float]:
        """The present lambda of each group."""
        values = per_group(self.gated.groups, self.schedule(self.steps), "lam")
        return {group.name: lam for group, lam in zip(self.gated.groups, values, strict=True)}

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs: the position in the schedule."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.steps = state["steps"]
        self._update()

    def squared_norms(self) -> Tensor:
        """||theta_g||^2 of every gate, the sum that its weight decay counts (eq. 17)."""
        return torch.cat([group.squared_norms(self.gated.model) for group in self.gated.groups])

    def _squares_without_gates(self) -> Tensor | float:
        """Of weights without a gate, in parameters that have gates."""
        squares: Tensor | float = 0.0
        for name, indices in self._free.items():
            part = raw_parameter(self.gated.model, name)
            for dim, index in indices.items():
                part = part.index_select(dim, index.to(part.device))
            squares = squares + part.float().square().sum()
        return squares

    def _update(self) -> None:
        """Write lam * |g| of every gate, in place: a captured CUDA graph reads it there.

        |g| stays that of the dense model when ``shrink`` removes units.
        """
        now = self.lam
        for name, lam in now.items():
            if not isinstance(lam, Real) or isinstance(lam, bool):
                raise ArgumentError(f"{name}: lam={lam!r} must be a number")
            if not 0 <= float(lam) < math.inf:
                raise ArgumentError(f"{name}: lam={lam} must not be negative or infinite")
        same_gates = len(self.prices) == self.gated.gates.count
        if same_gates and now == self._priced:
            return
        groups, bank = self.gated.groups, self.gated.gates
        if not same_gates:
            self._refuse_long_prior()
            self.prices = torch.zeros(bank.count, dtype=bank.dtype, device=bank.device)
            self._free = {
                name: {dim: index.to(bank.device) for dim, index in by_dim.items()}
                for name, by_dim in without_gates(groups).items()
            }
        prices = [
            torch.full((group.units,), float(now[group.name]) * group.size) for group in groups
        ]
        self.prices.copy_(torch.cat(prices))
        self._priced = now

    def _refuse_long_prior(self) -> None:
        entries = 1 if self.prior is None else self.prior.batch_shape.numel()
        if entries not in (1, self.gated.gates.count):
            raise ArgumentError(
                f"the prior has {entries} entries, and {self.gated.gates.count} gates remain after "
                "units were removed: build a new L0Penalty with a prior for these"
            )

    def _refuse_second_decay(self) -> None:
        """Refuse weights that decay in an optimizer already."""
        names = frozenset(name for group in self.gated.groups for name in group.gated_parameters)
        if names & self.gated.decay.by_optimizer:
            raise ArgumentError(
                "parameter_groups(weight_decay=...) was called before this penalty, so the gated "
                "weights would decay twice; build the L0Penalty first, and the optimizer after it "
                "(parameter_groups(gated, lr) without a decay takes that call back)"
            )


def _check_arguments(
    gated: object, cost: object, weight_decay: Any, prior: object, examples: object
) -> None:
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"L0Penalty takes what attach_gates returned, not a {type(gated).__name__}"
        )
    if not gated.gates.family.has_l0:
        raise ArgumentError(
            f"{type(gated.gates.family).__name__} gates are never 0 in training, so they have no "
            "expected L0 norm: use hc.MethodPenalty(gated, examples=N)"
        )
    if cost != "group_size":
        raise ArgumentError(f"cost={cost!r} is not known; use 'group_size'")
    if not isinstance(weight_decay, Real) or isinstance(weight_decay, bool):
        raise ArgumentError(f"weight_decay={weight_decay!r} must be a number")
    _refuse_no_count(examples)
    if not 0 <= float(weight_decay) < math.inf:
        raise ArgumentError(f"weight_decay={weight_decay} must not be negative or infinite")
    if prior is not None and examples is None:
        raise ArgumentError("a prior needs examples=N: its divergence counts 1/N in a mean loss")


def _refuse_no_count(examples: object) -> None:
    if examples is None:
        return
    number = isinstance(examples, Real) and not isinstance(examples, bool)
    if not number or not float(examples).is_integer() or examples < 1:  # type: ignore[arg-type, operator]
        raise ArgumentError(f"examples={examples!r} must be a whole number, 1 or more")


def _as_schedule(lam: Lam | LamSchedule, examples: int | None) -> LamSchedule:
    """Any kind of lambda as a function of the number of steps."""
    if isinstance(lam, str):
        if lam not in ("aic", "bic"):
            raise ArgumentError(
                f"lam={lam!r} is not known; use a number, a mapping, 'aic' or 'bic'"
            )
        if examples is None:
            raise ArgumentError(f"lam={lam!r} needs examples=N, the number of training examples")
        value = 1 / examples if lam == "aic" else math.log(examples) / (2 * examples)
        return lambda _: value
    if callable(lam):
        return lam
    return lambda _: lam
