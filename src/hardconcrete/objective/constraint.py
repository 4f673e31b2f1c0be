"""What a budget is about: a cost, its dense total and the target, checked before training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from hardconcrete.cost.ledger import KINDS, Ledger
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel, Group
from hardconcrete.gating.gated_model import LATENCY

WORDS = {
    "params": "parameters",
    "macs": "MACs",
    "weight_bytes": "bytes of weights",
    LATENCY: "milliseconds",
}

Limit = float | int
"""A fraction of the dense total up to 1.0, or an absolute number."""


@dataclass(frozen=True)
class Constraint:
    """A cost that may not be larger than a limit.

    Args:
        name: ``"macs"``, or ``"units"`` of all groups, or ``"units of fc1"``.
        words: the cost in words.
        dense: its total without gates.
        limit: what it may be, in the same unit.
        kind: its place among the costs of the ledger, None for units and latency.
        group: name of the group that it is about, None for all.
    """

    name: str
    words: str
    dense: float
    limit: float
    kind: int | None
    group: str | None = None

    def gates(self, gated: GatedModel) -> slice:
        """The gates that it is about."""
        if self.group is None:
            return slice(0, len(gated.gates.log_alpha))
        return _group(gated, self.group).slice

    def expected(self, gated: GatedModel, probability: Tensor, costs: Tensor) -> Tensor:
        """Its mean as a part of the dense total, for gates open with these probabilities.

        Args:
            gated: the model.
            probability: of every gate.
            costs: what the ledger says of them.
        """
        if self.name == LATENCY:
            return gated.latency.expected(probability) / self.dense
        if self.kind is None:
            return probability[self.gates(gated)].double().sum() / self.dense
        return costs[self.kind] / self.dense

    def delivered(self, gated: GatedModel, is_open: Tensor, costs: Tensor) -> Tensor:
        """The same of what is left when these gates are open, which the ledger says costs this."""
        if self.name == LATENCY:
            return gated.latency.delivered(is_open) / self.dense
        if self.kind is None:
            about = [group for group in gated.groups if self.group in (None, group.name)]
            left = [is_open[g.slice].sum().clamp(min=float(g.keeps_one)) for g in about]
            return torch.stack(left).double().sum() / self.dense
        return costs[self.kind] / self.dense


def delivered(
    gated: GatedModel,
    limits: Sequence[Constraint],
    is_open: Tensor,
    *,
    ledger: Ledger | None = None,
) -> Tensor:
    """Each cost as a part of its dense total, of what is left when these gates are open.

    Args:
        gated: the model.
        limits: the costs.
        is_open: 0 or 1 for every gate.
        ledger: a copy of the model's ledger, on the device of ``is_open``.
    """
    costs = ledger_costs(gated, limits, is_open, ledger=ledger)
    return torch.stack([limit.delivered(gated, is_open, costs) for limit in limits])


def expected(
    gated: GatedModel,
    limits: Sequence[Constraint],
    probability: Tensor,
    *,
    exactly: bool = False,
    ledger: Ledger | None = None,
) -> Tensor:
    """The mean of each cost as a part of its dense total, for gates open with probabilities.

    A budget pays by what is nearly the mean: no gate shall shut because its group, left with
    nothing, would take others along.
    """
    costs = ledger_costs(gated, limits, probability, exactly=exactly, ledger=ledger)
    return torch.stack([limit.expected(gated, probability, costs) for limit in limits])


def ledger_costs(
    gated: GatedModel,
    limits: Sequence[Constraint],
    gates: Tensor,
    *,
    exactly: bool = False,
    ledger: Ledger | None = None,
) -> Tensor:
    """What the ledger says of gates or probabilities; nothing where no limit is about it."""
    if all(limit.kind is None for limit in limits):
        return gates.new_zeros(0)
    ledger = gated.ledger if ledger is None else ledger
    return ledger.mean(gates) if exactly else ledger.cost(gates)


def constraints(
    gated: GatedModel,
    limits: Mapping[str, Limit | None],
    units: Limit | Mapping[str, Limit] | None,
    latency_ms: float | None = None,
) -> tuple[Constraint, ...]:
    """The limits as constraints, each of which can be met."""
    found = []
    for name, limit in limits.items():
        if limit is not None:
            kind = KINDS.index(name)
            dense = gated.ledger.dense[kind].item()
            least = gated.ledger.cost(cheapest(gated, kind))[kind].item()
            absolute = _absolute(name, limit, dense)
            _refuse_less_than_least(name, absolute, least, dense)
            found.append(Constraint(name, WORDS[name], dense, absolute, kind))
    if latency_ms is not None:
        found.append(_latency(gated, latency_ms))
    if isinstance(units, Mapping):
        for name, limit in units.items():
            group = _group(gated, name)
            words = f"units of {name}"
            dense = group.all_units
            absolute = _absolute(words, limit, dense)
            found.append(Constraint(words, words, dense, absolute, None, name))
    elif units is not None:
        dense = sum(group.all_units for group in gated.groups)
        absolute = _absolute("units", units, dense)
        kept = sum(group.keeps_one for group in gated.groups)
        if absolute < kept:
            raise ArgumentError(f"units={units} are too few: each of {kept} groups keeps one")
        found.append(Constraint("units", "units", dense, absolute, None))
    if not found:
        raise ArgumentError("a budget needs a limit, for example Budget(gated, macs=0.5)")
    return tuple(found)


def _latency(gated: GatedModel, limit: float) -> Constraint:
    """Milliseconds, not a fraction: a deadline is what one has."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ArgumentError(f"{LATENCY}={limit!r} must be a number of milliseconds above 0")
    table = gated.latency
    if limit > table.dense:
        raise ArgumentError(f"{LATENCY}={limit} is met by the dense model, which takes {table}")
    least = table.delivered(cheapest(gated)).item()
    _refuse_less_than_least(LATENCY, float(limit), least, table.dense)
    return Constraint(LATENCY, WORDS[LATENCY], table.dense, float(limit), None)


def _absolute(name: str, limit: Limit, dense: float) -> float:
    """A limit in the unit of its cost."""
    if isinstance(limit, Mapping):
        raise ArgumentError(f"{name}={limit!r}: what is limited by group are units={{name: limit}}")
    if isinstance(limit, bool) or not isinstance(limit, Real) or not math.isfinite(limit):
        raise ArgumentError(f"{name}={limit!r} must be a fraction such as 0.5, or a whole number")
    limit = int(limit) if isinstance(limit, Integral) else float(limit)
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise ArgumentError(
            f"{name}={limit}: a float is a fraction of the dense total, above 0 and up to 1; "
            "give an absolute number as an int"
        )
    if not 0 < limit <= dense:
        raise ArgumentError(f"{name}={limit:,} must lie between 1 and the dense {dense:,.0f}")
    absolute = limit * dense if isinstance(limit, float) else float(limit)
    if name.startswith("units") and absolute < 1:
        raise ArgumentError(f"{name}={limit} is less than one unit of {dense:,.0f}")
    return absolute


@torch.no_grad()
def cheapest(gated: GatedModel, kind: int = KINDS.index("macs")) -> Tensor:
    """Which gates are open where one unit of each group is, one by one the cheapest.

    With none, what cannot be gated would be dead, and cost less. Single weights are too many to be
    shut for a unit that goes.
    """
    is_open = torch.zeros_like(gated.gates.log_alpha)
    for group in gated.groups:
        is_open[group.start if group.keeps_one else group.slice] = 1.0
    alike = gated.ledger.remaining_gate_kinds().tolist()
    for group in gated.groups:
        if group.keeps_one:
            numbers = range(group.start, group.start + group.units)
            firsts = {alike[gate]: gate for gate in reversed(numbers)}
            trials = [is_open.clone() for _ in firsts]
            for trial, gate in zip(trials, firsts.values(), strict=True):
                trial[group.slice] = 0.0
                trial[gate] = 1.0
            is_open = min(trials, key=lambda trial: gated.ledger.cost(trial)[kind].item())
    return is_open


def _refuse_less_than_least(name: str, limit: float, least: float, dense: float) -> None:
    if limit < least:
        raise ArgumentError(
            f"a budget of {100 * limit / dense:.3g}% of the {WORDS[name]} cannot be met: "
            f"{100 * least / dense:.3g}% are not gated, or belong to the one unit that each group "
            "keeps"
        )


def _group(gated: GatedModel, name: str) -> Group:
    for group in gated.groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in gated.groups)
    raise ArgumentError(f"units: {name!r} is not a group; the groups are {known}")
