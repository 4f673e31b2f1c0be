"""How far a penalty alone moves the gates, by simulating the optimizer on its gradient.

Only the penalty moves the gate of a unit that the task does not need. Under plain SGD with momentum
m, the location of a gate falls by (lr / (1 - m)) lambda |g| dP(open)/dlocation in a step. For hard
concrete gates that derivative is at most 1/4. Under Adam the location falls by about lr, whatever
the size of the gradient.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam

from hardconcrete.objective.learned_budget import LearnedBudget
from hardconcrete.objective.penalty import L0Penalty

LrFactor = Callable[[int], float]
"""A factor on the learning rate, as a function of the step."""

NORMALISING_OPTIMIZERS = (Adam, NAdam, RAdam, Adamax)  # AdamW is an Adam
"""Optimizers that divide the gradient by its root mean square."""

MAX_INTERVALS = 200
"""A run is simulated in at most this many intervals of several steps."""

MAX_ABS_LOCATION = 60.0
"""Locations are clamped to this absolute value. Beyond it a sigmoid has no gradient."""


@dataclass(frozen=True)
class UpdateRule:
    """How an optimizer changes the gates in one step.

    Args:
        lr: learning rate of the gates.
        momentum_gain: the sum of all updates from one gradient under momentum m, 1 / (1 - m).
        normalised: whether the gradient is divided by its root mean square, as in Adam.
        beta1: Adam's decay rate of the mean gradient.
        beta2: Adam's decay rate of the mean squared gradient.
        eps: added to the root mean square.
        rectified: whether early steps are shortened, as in RAdam.
        weight_decay: of the gates. It pulls locations to 0, where a gate is half open.
        decoupled: whether weight decay is added after the division, as in AdamW.
    """

    lr: float
    momentum_gain: float = 1.0
    normalised: bool = False
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    rectified: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer, parameter: Tensor) -> "UpdateRule | None":
        """The rule for a parameter; None if the optimizer does not have it, or is not supported.

        Example:
            >>> gates = torch.nn.Parameter(torch.zeros(3))
            >>> UpdateRule.of(SGD([gates], lr=0.1, momentum=0.5), gates).momentum_gain
            2.0
        """
        for group in optimizer.param_groups:
            if any(candidate is parameter for candidate in group["params"]):
                return cls._of_group(optimizer, group)
        return None

    @classmethod
    def _of_group(cls, optimizer: Optimizer, group: dict[str, Any]) -> "UpdateRule | None":
        normalised = isinstance(optimizer, NORMALISING_OPTIMIZERS)
        if not normalised and not isinstance(optimizer, SGD):
            return None
        momentum = float(group.get("momentum", 0.0))
        dampening = float(group.get("dampening", 0.0)) if momentum else 0.0
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        return cls(
            lr=float(group.get("initial_lr", group["lr"])),  # a scheduler may have changed it
            momentum_gain=(1 - dampening) / (1 - momentum),
            normalised=normalised,
            beta1=float(beta1),
            beta2=0.0 if isinstance(optimizer, Adamax) else float(beta2),
            eps=float(group.get("eps", 0.0)),
            rectified=isinstance(optimizer, RAdam),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", False)),
        )


class _SimulatedGates:
    """The locations of the gates, and the state that the optimizer has of them."""

    def __init__(self, rule: UpdateRule, location: Tensor) -> None:
        self.rule, self.location = rule, location
        self._mean, self._squares = torch.zeros_like(location), torch.zeros_like(location)
        self._steps = 0
        self._last_change, self._damping = torch.zeros_like(location), torch.ones_like(location)

    def update(self, gradient: Tensor, steps: int, factor: float) -> None:
        """Take some steps at once, with a factor on the learning rate."""
        rule = self.rule
        decay = rule.weight_decay * self.location
        if not rule.decoupled:
            gradient = gradient + decay
        if rule.normalised:
            gradient = self._normalised(gradient, steps)
        if rule.decoupled:
            gradient = gradient + decay
        self._change_by(-steps * factor * rule.lr * rule.momentum_gain * gradient)

    def _change_by(self, change: Tensor) -> None:
        """Damp the change where its sign has flipped: single steps would not have overshot."""
        flipped = change * self._last_change < 0
        damping = self._damping
        self._damping = torch.where(flipped, 0.5 * damping, (1.5 * damping).clamp(max=1.0))
        self._last_change = self._damping * change
        self.location = (self.location + self._last_change).clamp(
            -MAX_ABS_LOCATION, MAX_ABS_LOCATION
        )

    def _normalised(self, gradient: Tensor, steps: int) -> Tensor:
        """Adam's mean gradient over its root mean square, both without bias."""
        beta1, beta2 = self.rule.beta1, self.rule.beta2
        self._steps += steps
        self._mean = self._mean.lerp(gradient, 1 - beta1**steps)
        self._squares = self._squares.lerp(gradient.square(), 1 - beta2**steps)
        size = (self._squares / (1 - beta2**self._steps)).sqrt()
        mean = self._mean / (1 - beta1**self._steps) / (size + self.rule.eps)
        return mean * _rectification(beta2, self._steps) if self.rule.rectified else mean


def _rectification(beta2: float, steps: int) -> float:
    """RAdam's factor on a step; 0 for its first steps, which hardly move the gates.

    Example:
        >>> [round(_rectification(0.999, steps), 2) for steps in (3, 100, 1000, 10_000)]
        [0.0, 0.22, 0.65, 1.0]
    """
    last = 2 / (1 - beta2) - 1
    now = last - 2 * steps * beta2**steps / (1 - beta2**steps)
    if now <= 5:
        return 0.0
    return math.sqrt((now - 4) * (now - 2) * last / ((last - 4) * (last - 2) * now))


def simulate_penalty(
    penalty: L0Penalty, rule: UpdateRule, steps: int, factor: LrFactor, *, lam_factor: float = 1.0
) -> Tensor:
    """The location of every gate after a run in which only a penalty moves it.

    Args:
        penalty: with its schedule of lambda. The weights do not change.
        rule: how the optimizer changes the gates.
        steps: of the optimizer.
        factor: on the learning rate, as a function of the steps so far.
        lam_factor: a factor on lambda.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> rule = UpdateRule(lr=0.1)
        >>> end = simulate_penalty(hc.L0Penalty(gated, 0.1), rule, 100, lambda step: 1.0)
        >>> (end < gated.gates.log_alpha - 0.3).all()           # 10 * 3 * 0.1, times about 0.14
        tensor(True)
    """
    trial = FixedWeightsPenalty(penalty, lam_factor)
    bank = penalty.gated.gates
    simulated = _SimulatedGates(rule, bank.location.detach().clone())
    for start, end in _intervals(steps):
        middle = (start + end) // 2
        trial.load_state_dict({"steps": penalty.steps + middle})
        location = simulated.location.requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(trial.of(bank.moved_to(location)), location)
        simulated.location = location.detach()
        simulated.update(gradient, end - start, factor(middle))
    return simulated.location


def simulate_budget(
    budget: LearnedBudget,
    rule: UpdateRule,
    steps: int,
    factor: LrFactor,
    until: Callable[[Tensor], bool] = lambda _: False,
) -> Tensor:
    """The lowest location of every gate in a run in which only a budget moves it.

    The budget's price grows while too many units are open. The budget and the gates are restored.

    Args:
        budget: with its price and its target.
        rule: how the optimizer changes the gates.
        steps: of the optimizer.
        factor: on the learning rate, as a function of the steps so far.
        until: takes the lowest locations so far, and ends the simulation where it is true.
    """
    location, state = budget.gated.gates.location, budget.state_dict()
    before = location.detach().clone()
    simulated, lowest = _SimulatedGates(rule, before.clone()), before.clone()
    try:
        for start, end in _intervals(steps):
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(budget(), location)
            simulated.update(gradient, end - start, factor((start + end) // 2))
            lowest = torch.minimum(lowest, simulated.location)
            if until(lowest):
                break
            with torch.no_grad():
                location.copy_(simulated.location)
                budget.advance(end - start)
    finally:
        with torch.no_grad():
            location.copy_(before)
        budget.load_state_dict(state)
    return lowest


def _intervals(steps: int) -> Iterator[tuple[int, int]]:
    """The first and last step of each interval."""
    ends = (
        torch.linspace(0, steps, min(steps, MAX_INTERVALS) + 1, dtype=torch.float64)
        .round()
        .tolist()
    )
    return pairwise(map(int, ends))


class FixedWeightsPenalty(L0Penalty):
    """A copy of a penalty with another lambda, for weights that do not change.

    The norms of the weights are computed once; a copy of a copy has them already.
    """

    def __init__(self, penalty: L0Penalty, lam_factor: float = 1.0) -> None:
        self.__dict__.update(penalty.__dict__)
        self.prices = penalty.prices.clone()
        self._norms = penalty.squared_norms().detach() if penalty.weight_decay else None

        def schedule(step: int) -> Any:
            lam = penalty.schedule(step)
            if isinstance(lam, Mapping):
                return {name: lam_factor * value for name, value in lam.items()}
            return lam_factor * lam

        self.schedule = schedule

    def squared_norms(self) -> Tensor:
        """The norms at the start of the simulation."""
        return self._norms if self._norms is not None else super().squared_norms()
