"""How far a penalty alone can take the gates: its gradient, followed as the optimiser would.

Nothing holds a useless unit open, so what moves its gate is the penalty. Under plain SGD with
momentum m, log_alpha falls by (lr / (1 - m)) lambda |g| dP(open)/dlog_alpha a step, and that slope
is at most 1/4; under Adam, whatever the size of the gradient, by about lr.
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

Schedule = Callable[[int], float]
NORMALISED = (Adam, NAdam, RAdam, Adamax)  # AdamW is an Adam
"""Optimisers that divide a gradient by its own size."""

STRIDES = 200
"""In how many strides a run is followed."""

EDGE = 60.0
"""Where a location is called lost: no sigmoid feels it there."""


@dataclass(frozen=True)
class Motion:
    """How an optimiser moves the gates in one step.

    Args:
        rate: learning rate of the gates.
        gain: the sum of what momentum makes of one gradient, 1 / (1 - m).
        normalised: whether the gradient is divided by its size, of late.
        lag: what is left of a gradient in the mean that is divided after one more step.
        memory: what is left of a squared gradient in that size after one more step.
        eps: what is added to that size.
        rectified: whether early steps are shortened, as RAdam's are.
        decay: weight decay of the gates, which pulls log_alpha to 0, where a gate is half open.
        decoupled: whether the decay is added after the division.
    """

    rate: float
    gain: float = 1.0
    normalised: bool = False
    lag: float = 0.0
    memory: float = 0.0
    eps: float = 0.0
    rectified: bool = False
    decay: float = 0.0
    decoupled: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer, parameter: Tensor) -> "Motion | None":
        """For a parameter; None where the optimiser does not have it, or is not known.

        Example:
            >>> gates = torch.nn.Parameter(torch.zeros(3))
            >>> Motion.of(SGD([gates], lr=0.1, momentum=0.5), gates).gain
            2.0
        """
        for group in optimizer.param_groups:
            if any(own is parameter for own in group["params"]):
                return cls._of_group(optimizer, group)
        return None

    @classmethod
    def _of_group(cls, optimizer: Optimizer, group: dict[str, Any]) -> "Motion | None":
        normalised = isinstance(optimizer, NORMALISED)
        if not normalised and not isinstance(optimizer, SGD):
            return None
        momentum = float(group.get("momentum", 0.0))
        dampening = float(group.get("dampening", 0.0)) if momentum else 0.0
        lag, memory = group.get("betas", (0.0, 0.0))
        return cls(
            rate=float(group.get("initial_lr", group["lr"])),  # a scheduler may have begun
            gain=(1 - dampening) / (1 - momentum),
            normalised=normalised,
            lag=float(lag),
            memory=0.0 if isinstance(optimizer, Adamax) else float(memory),
            eps=float(group.get("eps", 0.0)),
            rectified=isinstance(optimizer, RAdam),
            decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", False)),
        )


class _Mover:
    """The gates on their way."""

    def __init__(self, motion: Motion, location: Tensor) -> None:
        self.motion, self.location = motion, location
        self._mean, self._squares = torch.zeros_like(location), torch.zeros_like(location)
        self._steps = 0
        self._moved, self._pace = torch.zeros_like(location), torch.ones_like(location)

    def move(self, slope: Tensor, steps: int, factor: float) -> None:
        """Some steps at once, with a factor on the learning rate."""
        motion = self.motion
        pull = motion.decay * self.location
        if not motion.decoupled:
            slope = slope + pull
        if motion.normalised:
            slope = self._normalised(slope, steps)
        if motion.decoupled:
            slope = slope + pull
        self._stride(-steps * factor * motion.rate * motion.gain * slope)

    def _stride(self, far: Tensor) -> None:
        """Shorter where the last one went too far: single steps would have stopped in between."""
        turned = far * self._moved < 0
        self._pace = torch.where(turned, 0.5 * self._pace, (1.5 * self._pace).clamp(max=1.0))
        self._moved = self._pace * far
        self.location = (self.location + self._moved).clamp(-EDGE, EDGE)

    def _normalised(self, slope: Tensor, steps: int) -> Tensor:
        """The mean of the slopes by the root of that of their squares, both as Adam has them."""
        lag, memory = self.motion.lag, self.motion.memory
        self._steps += steps
        self._mean = self._mean.lerp(slope, 1 - lag**steps)
        self._squares = self._squares.lerp(slope.square(), 1 - memory**steps)
        size = (self._squares / (1 - memory**self._steps)).sqrt()
        mean = self._mean / (1 - lag**self._steps) / (size + self.motion.eps)
        return mean * _rectification(memory, self._steps) if self.motion.rectified else mean


def _rectification(memory: float, steps: int) -> float:
    """The factor of RAdam on a step; its first ones, by the gradient alone, are next to none.

    Example:
        >>> [round(_rectification(0.999, steps), 2) for steps in (3, 100, 1000, 10_000)]
        [0.0, 0.22, 0.65, 1.0]
    """
    last = 2 / (1 - memory) - 1
    now = last - 2 * steps * memory**steps / (1 - memory**steps)
    if now <= 5:
        return 0.0
    return math.sqrt((now - 4) * (now - 2) * last / ((last - 4) * (last - 2) * now))


def travel(
    penalty: L0Penalty, motion: Motion, steps: int, factor: Schedule, *, times: float = 1.0
) -> Tensor:
    """Where every gate is after a number of steps in which nothing but the penalty moves it.

    Args:
        penalty: with its schedule of lambda; the weights stay as they are.
        motion: of the gates.
        steps: of the optimiser.
        factor: on the learning rate, as a function of the steps so far.
        times: a factor on lambda.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> end = travel(hc.L0Penalty(gated, 0.1), Motion(rate=0.1), 100, lambda step: 1.0)
        >>> (end < gated.gates.log_alpha - 0.3).all()           # 10 * 3 * 0.1, times about 0.14
        tensor(True)
    """
    trial = Trial(penalty, times)
    bank = penalty.gated.gates
    mover = _Mover(motion, bank.log_alpha.detach().clone())
    for start, end in _strides(steps):
        middle = (start + end) // 2
        trial.load_state_dict({"steps": penalty.steps + middle})
        location = mover.location.requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(trial.of(bank.gate(location)), location)
        mover.location = location.detach()
        mover.move(slope, end - start, factor(middle))
    return mover.location


def pushed(
    budget: LearnedBudget,
    motion: Motion,
    steps: int,
    factor: Schedule,
    until: Callable[[Tensor], bool] = lambda _: False,
) -> Tensor:
    """How far down every gate gets in a number of steps in which nothing but a budget moves it.

    The budget's price grows as long as too much is open. Budget and gates are as before afterwards.
    Nobody goes on where what was reached is enough.
    """
    log_alpha, state = budget.gated.gates.log_alpha, budget.state_dict()
    before = log_alpha.detach().clone()
    mover, lowest = _Mover(motion, before.clone()), before.clone()
    try:
        for start, end in _strides(steps):
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(budget(), log_alpha)
            mover.move(slope, end - start, factor((start + end) // 2))
            lowest = torch.minimum(lowest, mover.location)
            if until(lowest):
                break
            with torch.no_grad():
                log_alpha.copy_(mover.location)
                budget._advance(end - start)
    finally:
        with torch.no_grad():
            log_alpha.copy_(before)
        budget.load_state_dict(state)
    return lowest


def _strides(steps: int) -> Iterator[tuple[int, int]]:
    ends = torch.linspace(0, steps, min(steps, STRIDES) + 1, dtype=torch.float64).round().tolist()
    return pairwise(map(int, ends))


class Trial(L0Penalty):
    """A penalty of its own, with another lambda, for weights that stay as they are.

    Their norms are taken once: a trial of a trial has them already.
    """

    def __init__(self, penalty: L0Penalty, times: float = 1.0) -> None:
        self.__dict__.update(penalty.__dict__)
        self._price = penalty._price.clone()
        self._norms = penalty._squared_norms().detach() if penalty.weight_decay else None

        def schedule(step: int) -> Any:
            lam = penalty.schedule(step)
            if isinstance(lam, Mapping):
                return {name: times * own for name, own in lam.items()}
            return times * lam

        self.schedule = schedule

    def _squared_norms(self) -> Tensor:
        return self._norms if self._norms is not None else super()._squared_norms()
