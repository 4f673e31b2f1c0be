"""The limits of a budget: each is a cost with its dense total and the most it may be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from hardconcrete.cost.ledger import KINDS, Ledger
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.costs import KEY_VALUES, LATENCY
from hardconcrete.units import Group

LABELS = {
    "params": "parameters",
    "macs": "MACs",
    "weight_bytes": "bytes of weights",
    KEY_VALUES: "bytes of keys and values per token",
    LATENCY: "milliseconds",
}

NO_KEY_VALUES = (
    "kv_bytes limits the keys and values of attention, and this model has none: no softmax of a "
    "product of two tensors is multiplied with a third one; limit macs or params instead"
)

BAND = 0.02
"""How far below its limit a delivered cost may stay, as a part of it; up to a unit more."""

Limit = float | int
"""A float up to 1.0 is a fraction of the dense total; an int is an absolute number."""


@dataclass(frozen=True)
class Constraint:
    """A limit on one cost.

    Args:
        name: ``"macs"``, or ``"units"`` of all groups, or ``"units of fc1"``.
        label: the cost in messages.
        dense: the cost of the model without gates.
        limit: the most that the cost may be, in the same unit.
        kind: the index of the cost in the ledger; None for units and latency.
        group: the name of the limited group; None for all groups.
    """

    name: str
    label: str
    dense: float
    limit: float
    kind: int | None
    group: str | None = None

    def gates(self, gated: GatedModel) -> slice:
        """The gates of the limited group, or all gates."""
        if self.group is None:
            return slice(0, gated.gates.count)
        return _group(gated, self.group).slice

    def expected(self, gated: GatedModel, probability: Tensor, costs: Tensor) -> Tensor:
        """The expected cost as a fraction of the dense total.

        Args:
            gated: the model.
            probability: for every gate, the probability to be open.
            costs: from ``ledger_costs`` for these probabilities.
        """
        if self.name == LATENCY:
            return gated.latency.expected(probability) / self.dense
        if self.kind is None:
            return probability[self.gates(gated)].double().sum() / self.dense
        return costs[self.kind] / self.dense

    def delivered(self, gated: GatedModel, is_open: Tensor, costs: Tensor) -> Tensor:
        """The delivered cost as a fraction of the dense total.

        Args:
            gated: the model.
            is_open: 0 or 1 for every gate.
            costs: from ``ledger_costs`` for this mask.
        """
        if self.name == LATENCY:
            return gated.latency.delivered(is_open) / self.dense
        if self.kind is None:
            limited = [group for group in gated.groups if self.group in (None, group.name)]
            units = [is_open[g.slice].sum().clamp(min=float(g.keeps_one)) for g in limited]
            return torch.stack(units).double().sum() / self.dense
        return costs[self.kind] / self.dense


def delivered(
    gated: GatedModel,
    limits: Sequence[Constraint],
    is_open: Tensor,
    *,
    ledger: Ledger | None = None,
) -> Tensor:
    """Each delivered cost as a fraction of its dense total.

    Args:
        gated: the model.
        limits: the limited costs.
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
    """Each expected cost as a fraction of its dense total.

    The approximation is for the prices of a budget. It ignores that a whole group can close and
    then removes other units, so that no gate closes for this reason.

    Args:
        gated: the model.
        limits: the limited costs.
        probability: for every gate, the probability to be open.
        exactly: whether to compute the mean over draws of the gates, not the approximation.
        ledger: a copy of the model's ledger, on the device of ``probability``.
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
    """All costs of the ledger for a mask or for probabilities; empty if no limit needs them."""
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
    """The limits as constraints; a limit that cannot be met is refused.

    Args:
        gated: the model.
        limits: for each cost of the ledger by name, its limit.
        units: a limit on the units of all groups together, or on those of each group by name.
        latency_ms: milliseconds of a call.
    """
    checked = [
        _ledger_cost(gated, name, limit) for name, limit in limits.items() if limit is not None
    ]
    if latency_ms is not None:
        checked.append(_latency(gated, latency_ms))
    if isinstance(units, Mapping):
        checked += [_units_of(gated, name, limit) for name, limit in units.items()]
    elif units is not None:
        checked.append(_all_units(gated, units))
    if not checked:
        raise ArgumentError("a budget needs a limit, for example Budget(gated, macs=0.5)")
    return tuple(checked)


def _ledger_cost(gated: GatedModel, name: str, limit: Limit) -> Constraint:
    kind = KINDS.index(name)
    dense = gated.costs.dense(name)
    if name == KEY_VALUES and not dense:
        raise ArgumentError(NO_KEY_VALUES)
    least = gated.ledger.cost(cheapest_mask(gated, kind))[kind].item()
    absolute = _absolute(name, limit, dense)
    _refuse_less_than_least(name, absolute, least, dense)
    return Constraint(name, LABELS[name], dense, absolute, kind)


def _units_of(gated: GatedModel, name: str, limit: Limit) -> Constraint:
    label, dense = f"units of {name}", _group(gated, name).dense_units
    return Constraint(label, label, dense, _absolute(label, limit, dense), None, name)


def _all_units(gated: GatedModel, limit: Limit) -> Constraint:
    dense = sum(group.dense_units for group in gated.groups)
    absolute = _absolute("units", limit, dense)
    kept = sum(group.keeps_one for group in gated.groups)
    if absolute < kept:
        raise ArgumentError(f"units={limit} are too few: each of {kept} groups keeps one")
    return Constraint("units", "units", dense, absolute, None)


def _latency(gated: GatedModel, limit: float) -> Constraint:
    """A limit in milliseconds. A fraction is refused, because deadlines are absolute."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ArgumentError(f"{LATENCY}={limit!r} must be a number of milliseconds above 0")
    table = gated.latency
    if limit > table.dense:
        raise ArgumentError(f"{LATENCY}={limit} is met by the dense model, which takes {table}")
    least = table.delivered(cheapest_mask(gated)).item()
    _refuse_less_than_least(LATENCY, float(limit), least, table.dense)
    return Constraint(LATENCY, LABELS[LATENCY], table.dense, float(limit), None)


def _absolute(name: str, limit: Limit, dense: float) -> float:
    """The limit in the unit of its cost."""
    if isinstance(limit, Mapping):
        raise ArgumentError(
            f"{name}={limit!r}: only units can be limited by group: units={{name: limit}}"
        )
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
def cheapest_mask(gated: GatedModel, kind: int = KINDS.index("macs")) -> Tensor:
    """A mask with only the cheapest unit of each group open, chosen group by group.

    A group keeps a unit, because without one even layers without gates would cost nothing. Groups
    that may lose all units are closed. All single weights stay open.
    """
    is_open = torch.zeros(gated.gates.count, dtype=gated.gates.dtype, device=gated.gates.device)
    for group in gated.groups:
        if not group.may_empty:
            is_open[group.slice if group.of_weights else group.start] = 1.0
    cost_classes = gated.ledger.remaining_gate_kinds().tolist()
    for group in gated.groups:
        if group.keeps_one:
            numbers = range(group.start, group.start + group.units)
            candidates = {cost_classes[gate]: gate for gate in reversed(numbers)}
            trials = [is_open.clone() for _ in candidates]
            for trial, gate in zip(trials, candidates.values(), strict=True):
                trial[group.slice] = 0.0
                trial[gate] = 1.0
            is_open = min(trials, key=lambda trial: gated.ledger.cost(trial)[kind].item())
    return is_open


def _refuse_less_than_least(name: str, limit: float, least: float, dense: float) -> None:
    if limit < least:
        raise ArgumentError(
            f"a budget of {100 * limit / dense:.3g}% of the {LABELS[name]} cannot be met: "
            f"{100 * least / dense:.3g}% are not gated, or belong to the one unit that each group "
            "keeps"
        )


def _group(gated: GatedModel, name: str) -> Group:
    for group in gated.groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in gated.groups)
    raise ArgumentError(f"units: {name!r} is not a group; the groups are {known}")
