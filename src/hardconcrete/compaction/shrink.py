"""Shrinking: units that have stayed shut are removed while the model is trained."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hardconcrete.compaction.module_form import guesses
from hardconcrete.compaction.planner import make_plan
from hardconcrete.compaction.shrink_history import ShrinkHistory, expanded, history_of
from hardconcrete.compaction.shrink_step import apply_shrink, gates_of, positions, remaining_groups
from hardconcrete.compaction.tensor_cuts import refuse_unknown_state
from hardconcrete.compaction.verify import difference
from hardconcrete.cost.ledger import KINDS
from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.gating import GatedModel, plain_copy

MACS = KINDS.index("macs")

ROUNDS = 8
"""How often it is asked anew which gates are left of those that are left."""


@dataclass(frozen=True)
class Shrink:
    """What a call of ``shrink`` did; true if it removed something.

    Args:
        done: whether units were removed.
        units: units of each group before and after, or as they would be after.
        macs: multiply-adds of the model before and after, likewise, and of the dense model.
        pays: the part of the multiply-adds that had to be saved.
    """

    done: bool
    units: Mapping[str, tuple[int, int]]
    macs: tuple[float, float, float]
    pays: float

    def __bool__(self) -> bool:
        return self.done

    @property
    def saved(self) -> float:
        """The part of the multiply-adds that is, or would be, saved."""
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
                words = "and a layer would be left with nothing: the network is collapsing"
            units = sum(a - b for a, b in changed.values())
            return f"nothing removed: {units:,} units have stayed shut, {words}"
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
    """Remove units whose gates have stayed shut, in place, so that training gets cheaper.

    Each call is a check, to be made between two steps: after every epoch, say. What goes is cut out
    of parameters, buffers, gates, gradients and the state of optimisers and averages, whose
    parameters stay the same objects. The model computes what it did with these gates at zero; the
    smaller one was compared with it before anything was changed. Costs and budgets go on in
    units of the dense model, and so does what ``compact`` and ``save`` make of it in the end.
    ``gated.state_dict()`` tells what is left; it loads into the dense model with gates attached as
    before.

    Only the user's own classes with smaller tensors can go on training: a model that ``compact``
    makes small as a graph is refused, and left as it is.

    Args:
        gated: what ``attach_gates`` returned.
        optimizer: one, several or None; SGD, Adam and all whose state has the parameters' shape.
        averages: copies of ``gated``, such as ``AveragedModel``s, that are to shrink along.
            Averages lag behind: let ``checks`` span more steps than they remember, or what goes is
            still open in them.
        below: a gate is shut if it opens with a smaller probability; ``"readout"``: if the readout
            shuts it, as at the last drop of a learning rate.
        checks: in how many checks in a row a gate must have been found shut.
        round_to: as many units of a group stay as fill multiples of this, the likeliest ones; more
            go only where gates are nested and a unit dies of another gate.
        pays: the least part of the multiply-adds to be saved, for which it is worth to compile or
            to capture anew; below it nothing happens.

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
    around = _listed(averages, nn.Module)
    _refuse_latency(gated)
    with torch.inference_mode(False):  # what is made inside could not be trained
        return _shrink(gated, optimizers, around, rule)


def _shrink(
    gated: GatedModel, optimizers: list[Optimizer], averages: list[nn.Module], rule: "_Rule"
) -> Shrink:
    copies = _copies(gated, averages)
    counted, stays = rule.apply(gated)
    present, after = gates_of(gated), None
    found = _described(gated, present[stays], rule.pays)
    if not stays.all() and found.saved >= rule.pays:
        planned = _planned(gated, present[stays])
        left = remaining_groups(planned)[1].to(present.device)
        if torch.isin(left, present).all():  # else a layer is left with nothing, and gets some back
            found = replace(_described(gated, left, rule.pays), done=len(left) < len(present))
            after = _rehearsed(gated, planned) if found else None
    if after is not None and after.plan.selections:
        _refuse_averaged_indices(averages)
    for each in (gated, *copies):
        each.gates.checks = counted.clone()
        if after is not None:
            apply_shrink(each, after, optimizers if each is gated else ())
    return found


def _refuse_averaged_indices(averages: list[nn.Module]) -> None:
    for average in averages:
        if getattr(average, "use_buffers", False):
            raise ArgumentError(
                f"this {type(average).__name__} averages buffers, and layers that select among "
                "their inputs would have indices there, which an average rounds: give it "
                "use_buffers=False, and call recalibrate on it"
            )


def _refuse_latency(gated: GatedModel) -> None:
    if gated._latency is not None:
        raise ArgumentError(
            "a latency table is about the widths it was measured with: shrink a model without one, "
            "and call measure_latency afterwards"
        )


def replay(gated: GatedModel, original: Tensor) -> None:
    """Remove what a saved model had removed; ``original`` says which gates it had left."""
    _refuse_latency(gated)
    known, original = history_of(gated), original.cpu()
    rises = len(original) > 0 and bool((original.diff() > 0).all())
    if not rises or original[0] < 0 or original[-1] >= known.gates:
        raise ArgumentError("the state is of another model: gates.original is not among its gates")
    positions(gates_of(gated).cpu(), original)
    after = _planned(gated, original)
    if not torch.equal(remaining_groups(after)[1], original):
        raise CompactionError(
            "the state is of another model, or of one whose gates were attached otherwise: the "
            "units that it has left cannot be left here"
        )
    apply_shrink(gated, _rehearsed(gated, after))


@dataclass(frozen=True)
class _Rule:
    """Which gates go, as the arguments of ``shrink`` say."""

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
            raise ArgumentError(f"pays={self.pays} must be a part of the MACs, below 1")

    @torch.no_grad()
    def apply(self, gated: GatedModel) -> tuple[Tensor, Tensor]:
        """For how many checks each gate has been shut, and which ones stay."""
        bank = gated.gates
        chance = bank.distribution().open_probability
        shut = bank.readout() == 0 if isinstance(self.below, str) else chance < self.below
        before = torch.zeros_like(shut, dtype=torch.int64) if bank.checks is None else bank.checks
        counted = torch.where(shut, before + 1, 0)
        stays = counted < self.checks
        for group in gated.groups:
            if all(axis.dim is not None for axis in group.axes):
                own = stays[group.slice]  # a view
                blocks = max(1, -(-int(own.sum()) // self.round_to))
                order = torch.where(own, 2.0, chance[group.slice]).argsort(descending=True)
                own[order[: blocks * self.round_to]] = True
        return counted, stays


def _optimizers(gated: Any, given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if not isinstance(gated, GatedModel):
        raise ArgumentError(
            f"shrink takes what attach_gates returned, not a {type(gated).__name__}"
        )
    if gated.gates.held:
        raise ArgumentError("shrink between two steps, not inside `with gated.draw():`")
    found = _listed(given, Optimizer)
    refuse_unknown_state(found, gated.parameters())
    return found


def _listed(given: Any, kind: type) -> list[Any]:
    """None, one or several of a kind; what is none of it is looked at later."""
    if given is None:
        return []
    one = isinstance(given, kind) or not isinstance(given, Iterable)
    return [given] if one else list(given)


def _copies(gated: GatedModel, averages: list[nn.Module]) -> list[GatedModel]:
    """The gated models inside averages, which have been shrunk alike so far."""
    names = [group.name for group in gated.groups]
    found = []
    for average in averages:
        inner: Any = average if isinstance(average, GatedModel) else getattr(average, "module", 0)
        alike = isinstance(inner, GatedModel) and [group.name for group in inner.groups] == names
        if not alike or inner is gated or not torch.equal(gates_of(inner), gates_of(gated)):
            raise ArgumentError(
                "averages takes copies of the gated model, such as AveragedModel(gated), that "
                f"have the same gates; this {type(average).__name__} is none"
            )
        found.append(inner)
    return found


def _described(gated: GatedModel, kept: Tensor, pays: float) -> Shrink:
    """What it means to keep these gates of those that are there."""
    stays = torch.isin(gates_of(gated), kept)
    ledger = gated.ledger
    costs = [ledger.cost(gates)[MACS].item() for gates in (torch.ones_like(stays), stays)]
    left = gated.by_group(stays)
    units = {group.name: (group.units, int(left[group.name].sum())) for group in gated.groups}
    return Shrink(False, units, (costs[0], costs[1], ledger.dense[MACS].item()), pays)


def _planned(gated: GatedModel, kept: Tensor) -> ShrinkHistory:
    """The plan that follows from the gates it leaves, so that these tell all.

    A gate can be shut and not removable, since zeros become something later, and units die that
    have no gates of their own: then what is left says more than what was asked for.
    """
    known, dense = history_of(gated), expanded(gated)
    plain = plain_copy(dense)
    for _ in range(ROUNDS):
        values = torch.zeros(known.gates, dtype=torch.float32).index_fill(0, kept.cpu(), 1.0)
        plan = make_plan(dense, plain, values=values)
        after = ShrinkHistory(known.dense, replace(plan, scales=()))
        left = remaining_groups(after)[1]
        if torch.equal(left, kept.cpu()):
            return after
        kept = left
    raise CompactionError("gates depend on each other in a way that leaves no answer what to cut")


def _rehearsed(gated: GatedModel, after: ShrinkHistory) -> ShrinkHistory:
    """The first variant of a plan that turns a copy into a model which computes the same."""
    reference, failures = copy.deepcopy(gated), []
    kept = positions(gates_of(gated).cpu(), remaining_groups(after)[1])
    own = gated.gates.log_alpha.detach()
    some = torch.linspace(0.5, 1.0, len(kept), dtype=own.dtype, device=own.device)  # all differ
    values = torch.zeros_like(own).index_copy(0, kept.to(own.device), some)
    for candidate in _variants(after):
        trial = copy.deepcopy(gated)
        try:
            apply_shrink(trial, candidate)
            trial.gates.readout()  # a gate may have learnt something for each of them
            with reference.gates.holding(None, values), trial.gates.holding(None, some):
                gap = difference(reference.model, trial.model, gated.example)
            if gap <= 1:
                return candidate
            failures.append(f"its outputs differ by {gap:.3g} times what is tolerated")
        except Exception as error:  # the user's forward may fail in any way
            failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    why = "; ".join(dict.fromkeys(failures))
    raise CompactionError(
        f"{type(gated.model).__name__} cannot shrink in place, and was left as it is. {why}. Sizes "
        "that are written into a forward do not shrink: take them from the tensors there, or "
        "leave it to hc.compact after training"
    )


def _variants(after: ShrinkHistory) -> Iterator[ShrinkHistory]:
    """As it is, and with sizes among the attributes of modules replaced."""
    yield after
    for guess in guesses(after.plan, plain_copy(after.dense)):
        attributes = {**after.plan.attributes, **guess}
        yield replace(after, plan=replace(after.plan, attributes=attributes))
