"""Warnings of runs that cannot prune, of collapsed groups, and of gates that are NaN."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hardconcrete.arguments import refuse_no_count
from hardconcrete.errors import ArgumentError, HardConcreteWarning
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.graph.model_state import nan_tensors
from hardconcrete.objective.budget import Budget
from hardconcrete.objective.gate_distance import (
    FixedWeightsPenalty,
    LrFactor,
    UpdateRule,
    simulate_budget,
    simulate_penalty,
)
from hardconcrete.objective.importance_budget import ImportanceBudget
from hardconcrete.objective.learned_budget import LearnedBudget
from hardconcrete.objective.penalty import L0Penalty

COLLAPSED_FRACTION = 0.02
"""A group that keeps at most this fraction of its units has nearly collapsed."""

MAX_ABS_LOCATION = 12.0
"""A readout closes no gate if it leaves one open at minus this, where P(open) is 3e-5."""

MAX_BISECTIONS = 40
"""Steps in the search for the location where a readout closes a gate."""

MAX_LR_TRIALS = 14
"""Learning rates that are tried for a budget, each 1.5 times the last, so up to 300 times it."""

ADAM_DEFAULTS: dict[str, Any] = {"normalised": True, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
"""The update rule of Adam with torch's defaults, but for the learning rate."""

MAX_FACTOR = 1e12
"""The largest factor on lambda or a learning rate that is proposed."""

MAX_GROUPS_LISTED = 3
"""Groups that a warning names; it counts the others."""


@dataclass(frozen=True)
class Reach:
    """How far the gates of a group can get in a run.

    Args:
        group: its name.
        start: the mean location of the gates now.
        end: their mean location at the end of the run, if only the penalty moves the gates. Under a
            budget, which releases gates when it is met, the mean of each gate's lowest.
        shut_below: the readout closes a gate below this location.
        shut: the number of gates that are closed at the end.
        already: the number of gates that are closed now.
        gates: the number of gates in the group.
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
        """Whether gates are open, and none of them gets closed."""
        return self.already < self.gates and self.shut <= self.already


def check_run(
    penalty: L0Penalty | Budget, optimizer: Optimizer, steps: int, schedule: LrFactor | None = None
) -> tuple[Reach, ...]:
    """Warn before the first step of a run that cannot prune, and name the number to change.

    The gates are simulated as if only the penalty moved them, as it does for units that the task
    does not need. Adam then moves a gate by about a learning rate in a step. The noise of the
    task's gradients slows it down, so a run without a warning can still fail.

    Args:
        penalty: with its schedule of lambda. A budget is simulated with its price, which grows as
            far as necessary. Its target must be reached when the run ends.
        optimizer: SGD, or Adam or a variant, with its learning rates.
        steps: of the optimizer, in the whole run.
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
    _refuse_bad_arguments(penalty, optimizer, steps)
    if schedule is not None and not callable(schedule):
        raise ArgumentError(
            f"schedule is a {type(schedule).__name__}; it takes a function of the step"
        )
    if isinstance(penalty, ImportanceBudget):
        _check_length(penalty, steps)
        return ()
    if not isinstance(penalty, L0Penalty | LearnedBudget):
        raise ArgumentError(f"check_run does not know a {type(penalty).__name__}")
    bank = penalty.gated.gates
    factor = schedule or (lambda _: 1.0)
    rule = UpdateRule.of(optimizer, bank.location)
    if rule is None or not bank.location.requires_grad:
        _warn(_why_not_simulated(bank, optimizer))
        return ()
    edge = _shut_below(bank)
    if edge.isneginf().any():
        _warn(
            f"this run cannot prune: the readout {bank.rule!r} closes no gate, however small its "
            f"{bank.family.location}; attach the gates with readout='paper' or 'median'"
        )
    if not isinstance(penalty, L0Penalty):
        return _check_budget(penalty, rule, steps, factor, edge)
    run = _Run(FixedWeightsPenalty(penalty), rule, steps, factor, edge, schedule is None)
    reaches = run.reaches()
    stuck = [reach for reach in reaches if reach.stuck and math.isfinite(reach.shut_below)]
    if stuck:
        _warn(_cannot_prune(stuck, len(reaches), run, type(optimizer).__name__))
    return reaches


def _refuse_bad_arguments(penalty: object, optimizer: object, steps: int) -> None:
    if not isinstance(penalty, L0Penalty | Budget):
        raise ArgumentError(
            f"check_run takes an L0Penalty or a Budget, not a {type(penalty).__name__}"
        )
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}, not one of torch.optim")
    refuse_no_count(steps=steps)


def _check_length(budget: ImportanceBudget, steps: int) -> None:
    """Warn if a budget by importance has not fixed the units when the run ends."""
    if not budget.settled and budget.steps_to_settle >= steps:
        _warn(
            "this run cannot meet its budget: the units are fixed after "
            f"{budget.steps_to_settle:,} more steps, and there are {steps:,}. "
            "Give the budget the length of the training: "
            f"hc.Budget(..., steps={max(10, steps)})",
            stacklevel=4,
        )


def _check_budget(
    budget: LearnedBudget, rule: UpdateRule, steps: int, factor: LrFactor, edge: Tensor
) -> tuple[Reach, ...]:
    """How far the gates get if only the budget moves them; warn if that is not far enough."""
    gated = budget.gated
    meets = partial(_meets, budget, edge)
    now = gated.gates.location.detach().clone()
    ends = simulate_budget(budget, rule, steps, factor)
    reaches = _reaches(gated, ends, edge)
    if meets(now):
        return reaches
    to_come = budget.steps_to_come
    if to_come >= steps:
        _warn(
            f"this run cannot meet its budget: the target comes down in {to_come:,} steps, and "
            f"there are {steps:,}. Give the budget the length of the training: "
            f"hc.Budget(..., steps={max(3, steps)})",
            stacklevel=4,
        )
    if not meets(ends):

        def suffices(rule: UpdateRule) -> bool:
            return meets(simulate_budget(budget, rule, steps, factor, until=meets))

        cure = _lr_that_suffices(rule, sum(map(factor, range(steps))), suffices)
        _warn(_cannot_meet_budget(budget, reaches, rule, steps, cure), stacklevel=4)
    return reaches


def _meets(budget: LearnedBudget, edge: Tensor, location: Tensor) -> bool:
    """Whether the budget is met with these gates, and one open unit in each group."""
    is_open = (location > edge).double()
    for gates in budget.gated.by_group(is_open).values():
        gates[0] = 1.0
    return bool((budget.delivered_by(is_open) <= budget.limits).all())


def _cannot_meet_budget(
    budget: LearnedBudget, reaches: tuple[Reach, ...], rule: UpdateRule, steps: int, cure: str
) -> str:
    limited = budget.gated.by_group(budget.concerned.any(0)).values()
    by_group = zip(reaches, limited, strict=True)
    worst = _farthest_from_closed([reach for reach, gates in by_group if gates.any()])
    return (
        f"this run cannot meet its budget: in {steps:,} steps it moves the gates of "
        f"{worst.group} by {worst.start - worst.end:.2g} at most, from {worst.start:.2f}, and "
        f"one is closed below {worst.shut_below:.2f}. {cure} (now {rule.lr:.3g}; "
        f"hc.parameter_groups(gate_lr=...)).{_about_decay(rule)}"
    )


def _lr_that_suffices(rule: UpdateRule, pace: float, suffices: Callable[[UpdateRule], bool]) -> str:
    """Advice on the learning rate of the gates; under SGD, on that of an Adam for them.

    Args:
        rule: the present one.
        pace: the sum of the factors on the learning rate over the run.
        suffices: whether the budget is met with a rule.
    """
    adam = ""
    if not rule.normalised:
        adam, rule = "a separate Adam and ", UpdateRule(pace and 1 / pace, **ADAM_DEFAULTS)
    rules = [replace(rule, lr=1.5**k * rule.lr) for k in range(1, MAX_LR_TRIALS + 1)]
    if not suffices(rules[-1]):
        return f"No learning rate up to {rules[-1].lr:.2g} would do"
    enough = next(filter(suffices, rules))
    return f"Give them {adam}a learning rate of {enough.lr:.2g} or more"


def check_gates(
    gated: GatedModel, loss: Tensor | float | None = None, optimizer: Optimizer | None = None
) -> tuple[str, ...]:
    """Warn of collapsed groups, and of numbers that are infinite or NaN. Call it once an epoch.

    Args:
        gated: the model.
        loss: the latest loss, to check that it is finite.
        optimizer: the one that trains the gates, to check that it has them.

    Returns:
        The messages. Each is also issued as a ``HardConcreteWarning``.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(4, 3), torch.zeros(2, 4), sites=[":in"])
        >>> hc.check_gates(gated, loss=torch.tensor(0.5))
        ()
    """
    if not isinstance(gated, GatedModel):
        raise ArgumentError(f"check_gates takes a GatedModel, not a {type(gated).__name__}")
    if not isinstance(loss, Tensor | Real | None):
        raise ArgumentError(f"loss is a {type(loss).__name__}; it takes a tensor or a number")
    if not isinstance(optimizer, Optimizer | None):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}, not one of torch.optim")
    by_budget = gated.gates.measured  # a budget by importance moves the gates itself
    not_trained = _without_gates(gated.gates, optimizer) if optimizer and not by_budget else ()
    messages = (*not_trained, *(_not_finite(gated, loss) or _collapsed(gated)))
    for message in messages:
        _warn(message)
    return messages


def _warn(message: str, stacklevel: int = 3) -> None:
    warnings.warn(message, HardConcreteWarning, stacklevel=stacklevel)


def _not_finite(gated: GatedModel, loss: Tensor | float | None) -> list[str]:
    messages = []
    if loss is not None and not torch.as_tensor(loss).isfinite().all():
        messages.append(
            f"the loss is {float(torch.as_tensor(loss).sum())}: lower the learning rate, clip the "
            "gradients, or check the last batch"
        )
    if broken := nan_tensors(gated.model):
        messages.append(
            f"there is NaN in {_listed(broken)}: go back to the last checkpoint with a lower "
            "learning rate"
        )
    for what, values in _values_and_gradients(gated.gates):
        if values is not None and not values.isfinite().all():
            groups = [
                name for name, part in gated.by_group(values).items() if not part.isfinite().all()
            ]
            messages.append(
                f"{what} is not finite in {_listed(groups)}: go back to "
                "the last checkpoint with a lower learning rate"
            )
    return messages


def _values_and_gradients(bank: GateBank) -> Iterator[tuple[str, Tensor | None]]:
    for name, values in bank.gate_parameters().items():
        yield name, values.detach()
        yield "its gradient", values.grad


def _collapsed(gated: GatedModel) -> list[str]:
    open_units = dict(zip(gated.gate_values(), gated.units_left(), strict=True))
    units = {group.name: group.dense_units for group in gated.groups}
    collapsed = [name for name, n in open_units.items() if n <= COLLAPSED_FRACTION * units[name]]
    remedy = (
        "to keep more, use a smaller lambda, a lambda for each group, a warm-up of lambda, or a "
        "budget"
    )
    if len(collapsed) == len(open_units):
        total = f"{sum(open_units.values())} of {sum(units.values())} units are left"
        return [f"the network has collapsed: {total}; {remedy}"]
    return [
        f"{name} has {'' if open_units[name] == 0 else 'nearly '}collapsed: {open_units[name]} of "
        f"{units[name]} units are left; {remedy}"
        for name in collapsed
    ]


def _why_not_simulated(bank: GateBank, optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if not bank.location.requires_grad:
        return "this run cannot prune: the gates are frozen; gated.freeze_gates(False) frees them"
    known = f"how far {name} moves gates is not known; check_run knows SGD, Adam and its variants"
    return next(iter(_without_gates(bank, optimizer)), known)


def _without_gates(bank: GateBank, optimizer: Optimizer) -> list[str]:
    """A message if gates that learn are not among the parameters of an optimizer."""
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if all(id(p) in has for p in bank.parameters() if p.requires_grad):
        return []
    return [
        f"this run cannot prune: the {type(optimizer).__name__} does not have the gates; build it "
        "from hc.parameter_groups(gated, lr=...)"
    ]


def _shut_below(bank: GateBank) -> Tensor:
    """For each gate, the largest location at which the readout closes it; -inf if none."""
    like = bank.location.detach()

    def is_open(location: Tensor) -> Tensor:
        with torch.no_grad():
            return bank.family.is_open(bank.moved_to(location), bank.rule)

    low, high = torch.full_like(like, -MAX_ABS_LOCATION), torch.full_like(like, MAX_ABS_LOCATION)
    never = is_open(low)
    for _ in range(MAX_BISECTIONS):
        middle = (low + high) / 2
        above = is_open(middle)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.where(never, -math.inf, low)


def _reaches(gated: GatedModel, ends: Tensor, edge: Tensor) -> tuple[Reach, ...]:
    start = gated.gates.location.detach()
    first, last, shut = (gated.by_group(values) for values in (start, ends, edge))
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
    """Everything that decides how far the gates get.

    Args:
        penalty: with its schedule of lambda.
        rule: how the optimizer changes the gates.
        steps: of the optimizer.
        factor: on the learning rate, by step.
        edge: for each gate, the location below which it is closed.
        constant_lr: whether the learning rate has no schedule.
    """

    penalty: L0Penalty
    rule: UpdateRule
    steps: int
    factor: LrFactor
    edge: Tensor
    constant_lr: bool

    def with_lambda(self, lam: float) -> "_Run":
        """The same run with another lambda, for all groups."""
        penalty = copy.copy(self.penalty)
        penalty.schedule = lambda _: lam
        return replace(self, penalty=penalty)

    def reaches(self, lam_factor: float = 1.0, lr_factor: float = 1.0) -> tuple[Reach, ...]:
        """How far the gates get, with factors on lambda and on the learning rate."""
        rule = replace(self.rule, lr=lr_factor * self.rule.lr)
        ends = simulate_penalty(self.penalty, rule, self.steps, self.factor, lam_factor=lam_factor)
        return _reaches(self.penalty.gated, ends, self.edge)

    def closes(self, lam_factor: float = 1.0, lr_factor: float = 1.0) -> bool:
        """Whether gates of every group get closed."""
        return not any(reach.stuck for reach in self.reaches(lam_factor, lr_factor))


def _smallest_factor(closes: Callable[[float], bool]) -> float | None:
    """The smallest factor above 1 that closes gates, to one per cent; None if none does."""
    if not closes(MAX_FACTOR):
        return None
    low, high = 1.0, MAX_FACTOR
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if closes(middle) else (middle, high)
    return high


def _farthest_from_closed(reaches: list[Reach]) -> Reach:
    return max(reaches, key=lambda reach: reach.end - reach.shut_below)


def _cannot_prune(stuck: list[Reach], groups: int, run: _Run, optimizer: str) -> str:
    worst = _farthest_from_closed(stuck)
    groups_in_words = stuck[0].group if groups == 1 else f"{len(stuck)} of {groups} groups"
    cures, location = _cures(run), run.penalty.gated.gates.family.location
    cure = f"What would do: {', or '.join(cures)}" if cures else "No lambda or rate would do"
    return (
        f"this run cannot prune {groups_in_words}: in {run.steps:,} steps of {optimizer} the "
        f"penalty alone takes {location} of {worst.group} from {worst.start:.2f} to "
        f"{worst.end:.2f}, and a gate is closed below {worst.shut_below:.2f}. {cure}."
        f"{_about_decay(run.rule)}"
    )


def _cures(run: _Run) -> list[str]:
    """The lambda, the learning rate or the number of steps with which the run would prune."""
    cures = []
    if run.penalty.prices.any():
        if lam := _smallest_factor(lambda factor: run.closes(lam_factor=factor)):
            cures.append(f"a lambda {_rounded_up(lam)} times as large")
    elif lam := _smallest_factor(lambda lam: run.with_lambda(lam / MAX_FACTOR).closes()):
        cures.append(f"a lambda of {1.01 * lam / MAX_FACTOR:.3g}, which is 0 now")
    if lr := _smallest_factor(lambda factor: run.closes(lr_factor=factor)):
        cures.append(
            f"a learning rate of {lr * run.rule.lr:.3g} for the gates (now "
            f"{run.rule.lr:.3g}; hc.parameter_groups(gate_lr=...))"
        )
        if run.constant_lr:
            cures.append(f"{_rounded_up(lr)} times the steps")
    return cures


def _about_decay(rule: UpdateRule) -> str:
    if not rule.weight_decay:
        return ""
    return " The optimizer's weight decay pulls gates open: give them none."


def _rounded_up(times: float) -> str:
    """A factor in two digits, rounded up because a smaller one would not suffice.

    Example:
        >>> _rounded_up(1.234), _rounded_up(38.2), _rounded_up(1201.0)
        ('1.3', '39', '1,300')
    """
    unit = 10.0 ** (math.floor(math.log10(times)) - 1)
    value = math.ceil(times / unit - 1e-9) * unit
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _listed(names: list[str]) -> str:
    shown, more = ", ".join(names[:MAX_GROUPS_LISTED]), len(names) - MAX_GROUPS_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
