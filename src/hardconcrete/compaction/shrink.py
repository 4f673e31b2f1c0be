"""Shrinking: units that have stayed closed are removed while the model is trained."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hardconcrete.compaction.not_a_number import refuse_nan
from hardconcrete.compaction.planner import make_plan
from hardconcrete.compaction.shrink_history import (
    ShrinkHistory,
    dense_indices,
    dense_model,
    positions_in,
)
from hardconcrete.compaction.shrink_step import apply_shrink
from hardconcrete.compaction.size_attributes import size_guesses
from hardconcrete.compaction.tensor_cuts import refuse_unknown_state
from hardconcrete.compaction.verify import difference, in_one_line
from hardconcrete.cost.ledger import KINDS
from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.gating import GatedModel, plain_copy
from hardconcrete.gating.shrunk_states import removes_units

MACS = KINDS.index("macs")

MAX_PLANS = 8
"""How many plans are made until one leaves exactly the gates that it was made for."""


@dataclass(frozen=True)
class Shrink:
    """What a call of ``shrink`` did. It is true if units were removed.

    Args:
        done: whether units were removed.
        units: units of each group before and after the cut, made or not.
        macs: multiply-adds before and after the cut, made or not, and those of the dense model.
        pays: the least fraction of the multiply-adds that had to be saved.
    """

    done: bool
    units: Mapping[str, tuple[int, int]]
    macs: tuple[float, float, float]
    pays: float

    def __bool__(self) -> bool:
        return self.done

    @property
    def saved(self) -> float:
        """The fraction of the multiply-adds that the cut saves, made or not."""
        before, after, _ = self.macs
        return 1 - after / before if before else 0.0

    def __str__(self) -> str:
        before, after, dense = self.macs
        changed = {name: pair for name, pair in self.units.items() if pair[0] != pair[1]}
        if not changed:
            return f"nothing to remove: at {before / dense:.1%} of the dense MACs"
        if not self.done:
            words = f"{self.saved:.1%} of the MACs, and {self.pays:.0%} would pay"
            if self.saved >= self.pays:
                words = "and a layer would lose all units: the network is collapsing"
            units = sum(a - b for a, b in changed.values())
            return f"nothing removed: {units:,} units have stayed closed, {words}"
        lines = [f"from {before / dense:.1%} to {after / dense:.1%} of the dense MACs"]
        return "\n".join([*lines, *(f"{name}: {a} to {b}" for name, (a, b) in changed.items())])


def shrink(
    gated: GatedModel,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    averages: nn.Module | Sequence[nn.Module] = (),
    below: float | Literal["readout"] = 0.01,
    checks: int = 1,
    round_to: int = 1,
    pays: float = 0.1,
) -> Shrink:
    """Remove units whose gates have stayed closed, in place, so that training gets cheaper.

    Each call is a check. Call it between two steps, for example after every epoch. The units are
    cut out of parameters, buffers, gates, gradients, and the state of optimizers and averages. All
    parameters stay the same objects. The model computes what it did with these gates at 0: a copy
    is cut and compared first. Costs and budgets stay in units of the dense model. ``compact`` and
    ``save`` work as for the dense model. ``gated.state_dict()`` records which units stay. It loads
    into the dense model with gates attached as before.

    The model stays one of your own classes with smaller tensors. Where only the graph form of
    ``compact`` is possible, ``shrink`` refuses, and the model does not change.

    Args:
        gated: what ``attach_gates`` returned.
        optimizer: one, several or None: SGD, Adam, and all whose state has the shape of the
            parameters.
        averages: copies of ``gated`` that shrink with it, such as ``AveragedModel``s. They lag
            behind: let ``checks`` span more steps than they average over, or units that are removed
            are still open in them.
        below: a gate is closed if it opens with a smaller probability, or with ``"readout"`` if the
            readout closes it. Use that after the last drop of the learning rate.
        checks: in how many checks in a row a gate must have been closed.
        round_to: the widths of groups stay multiples of this. The likeliest units stay. Where gates
            are nested, a unit can also go with another gate, and widths are others.
        pays: the least fraction of the multiply-adds to save, because the model has to be compiled
            or captured again. Below it nothing changes.

    Example:
        >>> import torch, hardconcrete as hc
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
        >>> gated = hc.attach_gates(model, torch.randn(2, 4))
        >>> optimizer = torch.optim.Adam(gated.parameters())
        >>> _ = gated.gates.log_alpha.data[:6].fill_(-20.0)
        >>> print(hc.shrink(gated, optimizer))
        from 100.0% to 25.0% of the dense MACs
        0: 8 to 2
        >>> model[0], gated.delivered("macs") / gated.ledger.dense[1]
        (Linear(in_features=4, out_features=2, bias=True), tensor(0.2500, dtype=torch.float64))
    """
    rule = _Rule(below, checks, round_to, pays)
    optimizers = _optimizers(gated, optimizer)
    averaged = _as_list(averages, nn.Module)
    _refuse_latency(gated)
    refuse_nan(gated)
    with torch.inference_mode(False):  # tensors made in inference mode cannot be trained
        return _shrink(gated, optimizers, averaged, rule)


def _shrink(
    gated: GatedModel, optimizers: list[Optimizer], averages: list[nn.Module], rule: "_Rule"
) -> Shrink:
    copies = _copies(gated, averages)
    counted, stays = rule.apply(gated)
    present, after = dense_indices(gated), None
    result = _result(gated, present[stays], rule.pays)
    if not stays.all() and result.saved >= rule.pays:
        planned = _planned(gated, present[stays])
        kept = planned.remaining_groups()[1].to(present.device)
        if torch.isin(kept, present).all():  # else a layer would be empty, and got units back
            result = replace(_result(gated, kept, rule.pays), done=len(kept) < len(present))
            after = _verified(gated, planned) if result else None
    if after is not None and after.plan.selections:
        _refuse_averaged_indices(averages)
    for each in (gated, *copies):
        each.gates.checks = counted.clone()
        if after is not None:
            apply_shrink(each, after, optimizers if each is gated else ())
    return result


def _refuse_averaged_indices(averages: list[nn.Module]) -> None:
    for average in averages:
        if getattr(average, "use_buffers", False):
            raise ArgumentError(
                f"this {type(average).__name__} averages buffers, and layers that select among "
                "their inputs would have indices there, which an average rounds: give it "
                "use_buffers=False, and call recalibrate on it"
            )


def _refuse_latency(gated: GatedModel) -> None:
    if gated.costs.has_latency:
        raise ArgumentError(
            "a latency table is about the widths it was measured with: shrink a model without one, "
            "and call measure_latency afterwards"
        )


@removes_units
def replay(gated: GatedModel, original: Tensor) -> None:
    """Remove what a saved model had removed.

    Args:
        gated: the model that loads the state.
        original: the dense indices of the gates that the saved model has.
    """
    _refuse_latency(gated)
    history, original = ShrinkHistory.of(gated), original.cpu()
    rises = len(original) > 0 and bool((original.diff() > 0).all())
    if not rises or original[0] < 0 or original[-1] >= history.gate_count:
        raise ArgumentError("the state is of another model: gates.original is not among its gates")
    positions_in(dense_indices(gated).cpu(), original)
    after = _planned(gated, original)
    if not torch.equal(after.remaining_groups()[1], original):
        raise CompactionError(
            "the state is of another model, or of one whose gates were attached otherwise: the "
            "units that it kept cannot be kept here"
        )
    apply_shrink(gated, _verified(gated, after))


@dataclass(frozen=True)
class _Rule:
    """Which gates are removed, by the arguments of ``shrink``."""

    below: float | str
    checks: int
    round_to: int
    pays: float

    def __post_init__(self) -> None:
        number = isinstance(self.below, Real) and 0 < self.below < 1
        if self.below != "readout" and not number:
            raise ArgumentError(f"below={self.below!r} must lie between 0 and 1, or be 'readout'")
        if any(not isinstance(n, int) or n < 1 for n in (self.checks, self.round_to)):
            raise ArgumentError(
                f"checks={self.checks} and round_to={self.round_to} must be whole numbers, at "
                "least 1"
            )
        if not isinstance(self.pays, Real) or not 0 <= self.pays < 1:
            raise ArgumentError(f"pays={self.pays} must be a fraction of the MACs, below 1")

    @torch.no_grad()
    def apply(self, gated: GatedModel) -> tuple[Tensor, Tensor]:
        """For how many checks in a row each gate was closed, and which gates stay."""
        bank = gated.gates
        probability = bank.open_probability()
        if isinstance(self.below, str):
            closed = ~(bank.is_open() | probability.isnan())
        else:
            closed = probability < self.below
        before = torch.zeros_like(closed, dtype=torch.int64) if bank.checks is None else bank.checks
        counted = torch.where(closed, before + 1, 0)
        stays = counted < self.checks
        for group in gated.groups:
            if all(axis.dim is not None for axis in group.axes):
                units = stays[group.slice]  # a view
                blocks = max(1, -(-int(units.sum()) // self.round_to))
                rank = torch.where(units, torch.inf, bank.ranking()[group.slice])
                order = rank.argsort(descending=True)
                units[order[: blocks * self.round_to]] = True
        return counted, stays


def _optimizers(gated: Any, optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The optimizers as a list; everything that can be refused before a cut is refused here."""
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"shrink takes what attach_gates returned, not a {type(gated).__name__}"
        )
    if gated.gates.held:
        raise ArgumentError("shrink between two steps, not inside `with gated.draw():`")
    optimizers = _as_list(optimizer, Optimizer)
    refuse_unknown_state(optimizers, gated.parameters())
    return optimizers


def _as_list(value: Any, kind: type) -> list[Any]:
    """None, one or several objects of a kind as a list. Other objects are refused later."""
    if value is None:
        return []
    one = isinstance(value, kind | Tensor) or not isinstance(value, Iterable)
    return [value] if one else list(value)


def _copies(gated: GatedModel, averages: list[nn.Module]) -> list[GatedModel]:
    """The gated models inside averages, which must have lost the same units so far."""
    names, indices = [group.name for group in gated.groups], dense_indices(gated)
    copies = []
    for average in averages:
        inner: Any = average if isinstance(average, GatedModel) else getattr(average, "module", 0)
        alike = isinstance(inner, GatedModel) and [group.name for group in inner.groups] == names
        if not alike or inner is gated or not torch.equal(dense_indices(inner), indices):
            raise ArgumentError(
                "averages takes copies of the gated model, such as AveragedModel(gated), that "
                f"have the same gates; this {type(average).__name__} is none"
            )
        copies.append(inner)
    return copies


def _result(gated: GatedModel, kept: Tensor, pays: float) -> Shrink:
    """The result of keeping the gates with these dense indices."""
    stays = torch.isin(dense_indices(gated), kept)
    ledger = gated.ledger
    costs = [ledger.cost(gates)[MACS].item() for gates in (torch.ones_like(stays), stays)]
    by_group = gated.by_group(stays)
    units = {group.name: (group.units, int(by_group[group.name].sum())) for group in gated.groups}
    return Shrink(False, units, (costs[0], costs[1], ledger.dense[MACS].item()), pays)


def _planned(gated: GatedModel, kept: Tensor) -> ShrinkHistory:
    """The plan for these gates, or for those that it leaves: they determine it.

    A closed gate can stay, where zeros turn into other numbers later. A unit without a gate can go.
    Then the plan is made again for the gates that the last one leaves.
    """
    history, dense = ShrinkHistory.of(gated), dense_model(gated)
    plain = plain_copy(dense, shared=dense.parameters())
    for _ in range(MAX_PLANS):
        values = torch.zeros(history.gate_count, dtype=torch.float32).index_fill(0, kept.cpu(), 1.0)
        plan = make_plan(dense, plain, values=values)
        after = history.with_plan(replace(plan, scales=()))
        remaining = after.remaining_groups()[1]
        if torch.equal(remaining, kept.cpu()):
            return after
        kept = remaining
    raise CompactionError(
        f"after {MAX_PLANS} plans each one still leaves other gates than it was made for: leave "
        "the units to hc.compact after training"
    )


def _verified(gated: GatedModel, after: ShrinkHistory) -> ShrinkHistory:
    """The first variant of a plan under which a copy computes the same as the model."""
    reference, failures = copy.deepcopy(gated), []
    kept = positions_in(dense_indices(gated).cpu(), after.remaining_groups()[1])
    zeros = torch.zeros(gated.gates.count, dtype=gated.gates.dtype, device=gated.gates.device)
    kept_values = torch.linspace(0.5, 1.0, len(kept)).to(zeros)  # no two are equal
    values = zeros.index_copy(0, kept.to(zeros.device), kept_values)
    for candidate in _variants(after):
        trial = copy.deepcopy(gated)
        try:
            apply_shrink(trial, candidate)
            trial.gates.readout()  # a gate may have parameters for each unit
            with reference.gates.holding(None, values), trial.gates.holding(None, kept_values):
                gap = difference(reference.model, trial.model, gated.example)
            if gap <= 1:
                return candidate
            failures.append(f"its outputs differ by {gap:.3g} times what is tolerated")
        except Exception as error:  # a forward may fail in any way
            failures.append(in_one_line(error))
    why = "; ".join(dict.fromkeys(failures))
    raise CompactionError(
        f"{type(gated.model).__name__} cannot shrink in place, and did not change. {why}. Sizes "
        "that are written into a forward do not shrink: take them from the tensors there, or call "
        "hc.compact after training"
    )


def _variants(after: ShrinkHistory) -> Iterator[ShrinkHistory]:
    """The plan as it is, and with new values of attributes that are sizes."""
    yield after
    for guess in size_guesses(after.plan, plain_copy(after.dense, shared=after.dense.parameters())):
        attributes = {**after.plan.attributes, **guess}
        yield after.with_plan(replace(after.plan, attributes=attributes))
