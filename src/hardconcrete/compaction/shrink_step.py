"""A gated model brought down to what a plan leaves of it, in place, while it is trained."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from hardconcrete.compaction.input_selection import stop_selecting
from hardconcrete.compaction.module_form import cut_module
from hardconcrete.compaction.plan import CompactionPlan, Cut
from hardconcrete.compaction.shrink_history import KEY, ShrinkHistory, cut_so_far
from hardconcrete.compaction.tensor_cuts import TensorCutter
from hardconcrete.errors import CompactionError
from hardconcrete.gating import GatedModel, remove_gates
from hardconcrete.gating.placement import put_gates_on
from hardconcrete.graph.propagate import first_names
from hardconcrete.units import Group
from hardconcrete.units.group import in_order


def apply_shrink(
    gated: GatedModel, after: ShrinkHistory, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Cut parameters, buffers, gates and optimisers; gates are taken off and put on again."""
    before, cutter = cut_so_far(gated), TensorCutter(optimizers)
    groups, original = remaining_groups(after)
    step = _step(before, after)
    kept = positions(gates_of(gated), original.to(gated.gates.log_alpha.device))
    model, bank = remove_gates(gated), gated.gates
    for path in before.selections.keys() - after.plan.selections.keys():
        stop_selecting(model.get_submodule(path))
    cut_module(step, model, cutter)
    cutter(bank.log_alpha, 0, kept)
    bank.original = original.to(kept.device)
    bank.checks = None if bank.checks is None else bank.checks[kept]
    gated.regroup(groups)
    put_gates_on(model, groups, bank)
    gated._latest = None
    gated._ledger = after.dense.ledger.for_remaining(original, after.gates).to(kept.device)
    gated.__dict__[KEY] = after


def gates_of(gated: GatedModel) -> Tensor:
    """The places that its gates had in the dense model."""
    log_alpha = gated.gates.log_alpha
    if gated.gates.original is None:
        return torch.arange(len(log_alpha), device=log_alpha.device)
    return gated.gates.original


def positions(known: Tensor, wanted: Tensor) -> Tensor:
    """Where the wanted ones are among the known; both rise."""
    found = torch.searchsorted(known, wanted)
    inside = found < len(known)
    if not inside.all() or not torch.equal(known[found], wanted):
        raise CompactionError("what was removed cannot come back: shrink a dense model anew")
    return found


def _step(before: CompactionPlan, after: ShrinkHistory) -> CompactionPlan:
    """The plan that leads from one to the other."""
    old = {(cut.tensor, cut.dim): cut for cut in before.cuts}
    new = {(cut.tensor, cut.dim): cut for cut in after.plan.cuts}
    if not old.keys() <= new.keys():
        raise CompactionError("what was removed cannot come back: shrink a dense model anew")
    cuts = []
    for place, cut in new.items():
        known = old[place].kept if place in old else tuple(range(cut.size))
        kept = positions(torch.tensor(known), torch.tensor(cut.kept))
        if len(kept) < len(known):
            cuts.append(Cut(cut.tensor, cut.dim, len(known), tuple(kept.tolist())))
    as_before = {name: _attribute(after.dense, name) for name in before.attributes}
    attributes = {**as_before, **after.plan.attributes}
    return replace(after.plan, cuts=tuple(cuts), attributes=attributes)


def _attribute(dense: GatedModel, name: str) -> int:
    path, _, attribute = name.rpartition(".")
    return int(getattr(dense.model.get_submodule(path), attribute))


def remaining_groups(after: ShrinkHistory) -> tuple[tuple[Group, ...], Tensor]:
    """The groups, and the places that their gates had in the dense model.

    A gate is gone when all that it multiplied is gone.
    """
    names = first_names(after.dense.model)
    cuts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for cut in after.plan.cuts:
        cuts[cut.tensor][cut.dim] = torch.tensor(cut.kept)
    groups, original = [], []
    for group in after.dense.groups:
        axes = [axis.cut(cuts[names[axis.tensor]]) for axis in group.axes]
        units = torch.cat([axis.units.flatten() for axis in axes if axis.gated]).unique()
        units = units[units >= 0]
        numbers = torch.full((group.units + 1,), -1)  # the last stands for none
        numbers[units] = torch.arange(len(units))
        axes = [axis.renumbered(numbers) for axis in axes]
        removed = group.units - len(units)
        groups.append(replace(group, axes=tuple(axes), units=len(units), removed=removed))
        original.append(units + group.start)
    return in_order(groups), torch.cat(original)
