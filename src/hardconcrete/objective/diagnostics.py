"""Warnings in words: once before a run, and whenever the gates are looked at."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hardconcrete.errors import ArgumentError, HardConcreteWarning
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.objective.budget import Budget
from hardconcrete.objective.gate_distance import Motion, Schedule, Trial, pushed, travel
from hardconcrete.objective.importance_budget import ImportanceBudget
from hardconcrete.objective.learned_budget import LearnedBudget
from hardconcrete.objective.penalty import L0Penalty

LITTLE = 0.02
"""A group with no larger part of its units left has nearly collapsed."""

SURELY = 12.0
"""A readout that leaves a gate open at minus this, where P(open) is 3e-5, shuts none."""

TRIES = 14
"""Learning rates that are tried for a budget, each half as large again: up to 300 times its own."""

ADAM: dict[str, Any] = {"normalised": True, "lag": 0.9, "memory": 0.999, "eps": 1e-8}
"""How it moves gates, by torch's defaults."""

MOST = 1e12
"""The largest factor on lambda or a learning rate that is worth proposing."""


@dataclass(frozen=True)
class Reach:
    """How far the gates of a group can get.

    Args:
        group: its name.
        start: log_alpha now, the mean.
        end: log_alpha at the end of the run, if the penalty alone moves it; under a budget, which
            lets gates go when it is met, the lowest of each gate.
        shut_below: where the readout shuts a gate.
        shut: how many of its gates are shut by then.
        already: how many are shut now.
        gates: how many it has.
    """

    group: str
    start: float
    end: float
    shut_below: float
    shut: int
    already: int
    gates: int

    @property
    def stuck(self) -> bool:
        """Whether it has open gates, of which none gets shut."""
        return self.already < self.gates and self.shut <= self.already


def check_run(
    penalty: L0Penalty | Budget, optimizer: Optimizer, steps: int, schedule: Schedule | None = None
) -> tuple[Reach, ...]:
    """Warn before the first step of a run that cannot prune, with the number to change.

    The gates are followed as if nothing but the penalty moved them: so a unit must be closed that
    the task has no use for. Adam then moves by about a learning rate a step, and the noise of the
    task's gradients slows it down: silence is no promise.

    Args:
        penalty: as it will be used, its schedule of lambda included. A budget is followed with its
            price, which grows as far as it must, and its target must be down when the run ends.
        optimizer: SGD, or Adam and its kin, with its learning rates.
        steps: of the optimiser, in the whole run.
        schedule: a factor on the learning rate by step, as for ``LambdaLR``.

    Returns:
        How far each group gets.

    Example:
        >>> import torch, hardconcrete as hc, warnings
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> penalty = hc.L0Penalty(gated, lam=0.1)
        >>> optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-3))
        >>> reach, = hc.check_run(penalty, optimizer, steps=10_000)
        >>> reach.shut
        4
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     reach, = hc.check_run(penalty, optimizer, steps=1_000)
        >>> round(reach.end, 1), round(reach.shut_below, 1), len(caught)
        (-1.1, -2.4, 1)
    """
    if not isinstance(penalty, L0Penalty | Budget):
        raise ArgumentError(
            f"check_run takes an L0Penalty or a Budget, not a {type(penalty).__name__}"
        )
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}, not one of torch.optim")
    if steps < 1:
        raise ArgumentError(f"steps={steps} must be at least 1")
    if isinstance(penalty, ImportanceBudget):
        _check_length(penalty, steps)
        return ()
    if not isinstance(penalty, L0Penalty | LearnedBudget):
        raise ArgumentError(f"check_run does not know a {type(penalty).__name__}")
    bank = penalty.gated.gates
    factor = schedule or (lambda _: 1.0)
    motion = Motion.of(optimizer, bank.log_alpha)
    if motion is None or not bank.log_alpha.requires_grad:
        _warn(_why_still(bank, optimizer))
        return ()
    edge = _shut_below(bank)
    if edge.isneginf().any():
        _warn(
            f"this run cannot prune: the readout {bank.rule!r} shuts no gate, however small its "
            "log_alpha; attach the gates with readout='paper' or 'median'"
        )
    if not isinstance(penalty, L0Penalty):
        return _check_budget(penalty, motion, steps, factor, edge)
    trial = Trial(penalty)
    reaches = _reaches(penalty.gated, travel(trial, motion, steps, factor), edge)
    stuck = [reach for reach in reaches if reach.stuck and math.isfinite(reach.shut_below)]
    if stuck:
        run = _Run(trial, motion, steps, factor, edge, schedule is None)
        _warn(_cannot_prune(stuck, len(reaches), run, type(optimizer).__name__))
    return reaches


def _check_length(budget: ImportanceBudget, steps: int) -> None:
    """A budget by importance needs no learning rate, only the right length."""
    if not budget.settled and budget.steps_to_settle >= steps:
        _warn(
            "this run cannot meet its budget: the units are fixed after "
            f"{budget.steps_to_settle:,} more steps, and there are {steps:,}. "
            "Give the budget the length of the training: "
            f"hc.Budget(..., steps={max(10, steps)})",
            stacklevel=4,
        )


def _check_budget(
    budget: LearnedBudget, motion: Motion, steps: int, factor: Schedule, edge: Tensor
) -> tuple[Reach, ...]:
    """How far gates get that nothing but the budget moves."""
    gated, pace = budget.gated, sum(map(factor, range(steps)))
    now = gated.gates.log_alpha.detach().clone()

    def meets(location: Tensor) -> bool:
        """With all shut that can be by then, but one unit of each group."""
        is_open = (location > edge).double()
        for own in gated.by_group(is_open).values():
            own[0] = 1.0
        return bool((budget._delivered(is_open) <= budget._limits).all())

    ends = pushed(budget, motion, steps, factor)
    reaches = _reaches(gated, ends, edge)
    if meets(now):
        return reaches
    to_come = budget._steps_to_come()
    if to_come >= steps:
        _warn(
            f"this run cannot meet its budget: the target comes down in {to_come:,} steps, and "
            f"there are {steps:,}. Tell the budget: hc.Budget(..., steps={max(3, steps)})",
            stacklevel=4,
        )
    if not meets(ends):
        limited = budget._concerned.any(0)
        own = [
            reach
            for reach, part in zip(reaches, gated.by_group(limited).values(), strict=True)
            if part.any()
        ]
        worst = max(own, key=lambda reach: reach.end - reach.shut_below)
        adam, trial = "", motion
        if not motion.normalised:
            adam, trial = "an Adam of their own and ", Motion(pace and 1 / pace, **ADAM)
        rates = [1.5**k * trial.rate for k in range(1, TRIES + 1)]

        def suffices(rate: float) -> bool:
            return meets(pushed(budget, replace(trial, rate=rate), steps, factor, until=meets))

        cure = f"No learning rate up to {rates[-1]:.2g} would do"
        if suffices(rates[-1]):
            enough = next(filter(suffices, rates))
            cure = f"Give them {adam}a learning rate of {enough:.2g} or more"
        _warn(
            f"this run cannot meet its budget: in {steps:,} steps it moves the gates of "
            f"{worst.group} by {worst.start - worst.end:.2g} at most, from {worst.start:.2f}, and "
            f"one is shut below {worst.shut_below:.2f}. {cure} (now {motion.rate:.3g}; "
            f"hc.parameter_groups(gate_lr=...)).{_about_decay(motion)}",
            stacklevel=4,
        )
    return reaches


def check_gates(gated: GatedModel, loss: Tensor | float | None = None) -> tuple[str, ...]:
    """Warn of gates that have collapsed, and of numbers that are none. Call it once an epoch.

    Args:
        gated: the model.
        loss: the latest one, if it shall be looked at, too.

    Returns:
        The warnings, each given as a ``HardConcreteWarning`` as well.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> hc.check_gates(gated, loss=torch.tensor(0.5))
        ()
    """
    if not isinstance(gated, GatedModel):
        raise ArgumentError(f"check_gates takes a GatedModel, not a {type(gated).__name__}")
    found = tuple(_not_numbers(gated, loss) or _collapsed(gated))
    for words in found:
        _warn(words)
    return found


def _warn(words: str, stacklevel: int = 3) -> None:
    warnings.warn(words, HardConcreteWarning, stacklevel=stacklevel)


def _not_numbers(gated: GatedModel, loss: Tensor | float | None) -> list[str]:
    found = []
    if loss is not None and not torch.as_tensor(loss).isfinite().all():
        found.append(
            f"the loss is {float(torch.as_tensor(loss).sum())}: lower the learning rate, clip the "
            "gradients, or look at the last batch"
        )
    log_alpha = gated.gates.log_alpha
    for what, values in (("log_alpha", log_alpha.detach()), ("its gradient", log_alpha.grad)):
        if values is not None and not values.isfinite().all():
            groups = [
                name for name, own in gated.by_group(values).items() if not own.isfinite().all()
            ]
            found.append(
                f"{what} is not finite in {_listed(groups)}: the gates have no value; go back to "
                "the last checkpoint with a lower learning rate"
            )
    return found


def _collapsed(gated: GatedModel) -> list[str]:
    left = dict(zip(gated.gate_values(), gated.units_left(), strict=True))
    units = {group.name: group.dense_units for group in gated.groups}
    gone = [name for name, n in left.items() if n <= LITTLE * units[name]]
    remedy = "a smaller lambda, one by group, a slower start of it, or a budget keeps more"
    if len(gone) == len(left):
        total = f"{sum(left.values())} of {sum(units.values())} units are left"
        return [f"the network has collapsed: {total}; {remedy}"]
    return [
        f"{name} has {'' if left[name] == 0 else 'nearly '}collapsed: {left[name]} of "
        f"{units[name]} units are left; {remedy}"
        for name in gone
    ]


def _why_still(bank: GateBank, optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if not bank.log_alpha.requires_grad:
        return "this run cannot prune: the gates are frozen; gated.freeze_gates(False) frees them"
    if any(p is bank.log_alpha for group in optimizer.param_groups for p in group["params"]):
        return f"how far {name} moves gates is not known, only of SGD and of Adam and its kin"
    return (
        f"this run cannot prune: the {name} does not have the gates; build it from "
        "hc.parameter_groups(gated, lr=...)"
    )


def _shut_below(bank: GateBank) -> Tensor:
    """The largest log_alpha of each gate that the readout shuts; -inf where there is none."""
    like = bank.log_alpha.detach()

    def is_open(location: Tensor) -> Tensor:
        with torch.no_grad():
            return bank.gate(location).readout(bank.rule) > 0

    low, high = torch.full_like(like, -SURELY), torch.full_like(like, SURELY)
    never = is_open(low)
    for _ in range(40):
        middle = (low + high) / 2
        above = is_open(middle)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.where(never, -math.inf, low)


def _reaches(gated: GatedModel, ends: Tensor, edge: Tensor) -> tuple[Reach, ...]:
    start = gated.gates.log_alpha.detach()
    parts = (gated.by_group(values) for values in (start, ends, edge))
    first, last, shut = parts
    return tuple(
        Reach(
            group.name,
            first[group.name].mean().item(),
            last[group.name].mean().item(),
            shut[group.name].mean().item(),
            int((last[group.name] <= shut[group.name]).sum()),
            int((first[group.name] <= shut[group.name]).sum()),
            group.units,
        )
        for group in gated.groups
    )


@dataclass(frozen=True)
class _Run:
    """All that decides how far gates get."""

    penalty: L0Penalty
    motion: Motion
    steps: int
    factor: Schedule
    edge: Tensor
    constant: bool

    def with_lambda(self, lam: float) -> "_Run":
        """The same with another one, for all groups."""
        penalty = copy.copy(self.penalty)
        penalty.schedule = lambda _: lam
        return replace(self, penalty=penalty)

    def closes(self, lam: float = 1.0, rate: float = 1.0) -> bool:
        """Whether gates of every group get shut, with lambda or the rate times as large."""
        motion = replace(self.motion, rate=rate * self.motion.rate)
        ends = travel(self.penalty, motion, self.steps, self.factor, times=lam)
        return not any(reach.stuck for reach in _reaches(self.penalty.gated, ends, self.edge))


def _least(closes: Callable[[float], bool]) -> float | None:
    """The least factor above 1 that closes, to one per cent; None where none does."""
    if not closes(MOST):
        return None
    low, high = 1.0, MOST
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if closes(middle) else (middle, high)
    return high


def _cannot_prune(stuck: list[Reach], groups: int, run: _Run, optimizer: str) -> str:
    worst = max(stuck, key=lambda reach: reach.end - reach.shut_below)
    lam = _least(lambda times: run.closes(lam=times))
    rate = _least(lambda times: run.closes(rate=times))
    cures = [f"a lambda {_rounded(lam)} times as large"] if lam else []
    if not run.penalty._price.any():
        least = _least(lambda times: run.with_lambda(times / MOST).closes())
        cures = [f"a lambda of {1.01 * least / MOST:.3g}, which is 0 now"] if least else []
    if rate:
        cures.append(
            f"a learning rate of {rate * run.motion.rate:.3g} for the gates (now "
            f"{run.motion.rate:.3g}; hc.parameter_groups(gate_lr=...))"
        )
        if run.constant:
            cures.append(f"{_rounded(rate)} times the steps")
    cure = f"What would do: {', or '.join(cures)}" if cures else "No lambda or rate would do"
    return (
        f"this run cannot prune {_many(stuck, groups)}: in {run.steps:,} steps of {optimizer} the "
        f"penalty alone takes log_alpha of {worst.group} from {worst.start:.2f} to "
        f"{worst.end:.2f}, and a gate is shut below {worst.shut_below:.2f}. {cure}."
        f"{_about_decay(run.motion)}"
    )


def _about_decay(motion: Motion) -> str:
    if not motion.decay:
        return ""
    return " The optimiser's weight decay pulls gates open: give them none."


def _many(stuck: list[Reach], groups: int) -> str:
    if groups == 1:
        return stuck[0].group
    return f"{len(stuck)} of {groups} groups"


def _rounded(times: float) -> str:
    """Upwards, to two digits: a smaller number would not do.

    Example:
        >>> _rounded(1.234), _rounded(38.2), _rounded(1201.0)
        ('1.3', '39', '1,300')
    """
    unit = 10.0 ** (math.floor(math.log10(times)) - 1)
    value = math.ceil(times / unit - 1e-9) * unit
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more groups" if len(names) > 3 else shown
