"""What a model was before units were removed in training: the dense model, without its numbers."""

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction.plan import CompactionPlan, Cut
from hardconcrete.errors import CompactionError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.weight_noise import noise_key
from hardconcrete.graph.propagate import first_names, named_tensors
from hardconcrete.units import Group
from hardconcrete.units.axis import NO_UNIT
from hardconcrete.units.group import in_order


@dataclass(frozen=True, eq=False)
class ShrinkHistory:
    """A dense model, and what was cut from it so far. It never changes, so copies share it.

    Args:
        dense: the model with gates before the first cut, with all its tensors on the meta device.
        plan: what was cut from it.

    Example:
        >>> import hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> gated = hc.attach_gates(model, torch.randn(2, 4))
        >>> _ = gated.gates.log_alpha.data[:6].fill_(-20.0)
        >>> _ = hc.shrink(gated, None)
        >>> history = ShrinkHistory.of(gated)
        >>> history.gate_count, history.remaining_groups()[1].tolist()
        (8, [6, 7])
        >>> history.dense_copy(gated).model[0]
        Linear(in_features=4, out_features=8, bias=True)
    """

    dense: GatedModel
    plan: CompactionPlan

    @classmethod
    def of(cls, gated: GatedModel) -> "ShrinkHistory":
        """The history of a model; a new one where no unit was removed."""
        history = _recorded(gated)
        if history is not None:
            return history
        _ = gated.ledger  # costs stay those of the dense model: find them before it is cut
        return cls(_without_numbers(gated), plan_so_far(gated))

    def __deepcopy__(self, _: Any) -> "ShrinkHistory":
        return self

    @property
    def gate_count(self) -> int:
        """How many gates the dense model has."""
        return self.dense.gates.count

    def with_plan(self, plan: CompactionPlan) -> "ShrinkHistory":
        """The same dense model, with other cuts."""
        return replace(self, plan=plan)

    def remaining_groups(self) -> tuple[tuple[Group, ...], Tensor]:
        """The groups after the cuts, and the dense indices of their gates.

        A gate is removed when everything that it multiplied was cut.
        """
        names = first_names(self.dense.model)
        cuts: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for cut in self.plan.cuts:
            cuts[cut.tensor][cut.dim] = torch.tensor(cut.kept)
        groups, original = [], []
        for group in self.dense.groups:
            axes = [axis.cut(cuts[names[axis.tensor]]) for axis in group.axes]
            units = torch.cat([axis.units.flatten() for axis in axes if axis.gated]).unique()
            units = units[units >= 0]
            numbers = torch.full((group.units + 1,), NO_UNIT)  # the last one stands for no unit
            numbers[units] = torch.arange(len(units))
            axes = [axis.renumbered(numbers) for axis in axes]
            removed = group.units - len(units)
            groups.append(replace(group, axes=tuple(axes), units=len(units), removed=removed))
            original.append(units + group.start)
        return in_order(groups), torch.cat(original)

    def plan_after(self, before: CompactionPlan) -> CompactionPlan:
        """The plan for a model that was cut by an earlier plan of this history."""
        old = {(cut.tensor, cut.dim): cut for cut in before.cuts}
        new = {(cut.tensor, cut.dim): cut for cut in self.plan.cuts}
        if not old.keys() <= new.keys():
            raise CompactionError(CANNOT_COME_BACK)
        cuts = []
        for place, cut in new.items():
            known = old[place].kept if place in old else tuple(range(cut.size))
            kept = positions_in(torch.tensor(known), torch.tensor(cut.kept))
            if len(kept) < len(known):
                cuts.append(Cut(cut.tensor, cut.dim, len(known), tuple(kept.tolist())))
        as_before = {name: self._dense_attribute(name) for name in before.attributes}
        attributes = {**as_before, **self.plan.attributes}
        return replace(self.plan, cuts=tuple(cuts), attributes=attributes)

    def _dense_attribute(self, name: str) -> int:
        path, _, attribute = name.rpartition(".")
        return int(getattr(self.dense.model.get_submodule(path), attribute))

    def dense_copy(self, gated: GatedModel) -> GatedModel:
        """The dense model with the numbers of a shrunk one, and zeros for what was removed."""
        cuts = defaultdict[str, list[Cut]](list)
        for cut in self.plan.cuts:
            cuts[f"model.{cut.tensor}"].append(cut)
            cuts[f"gates.log_variances.{noise_key(cut.tensor)}"].append(cut)
        small = named_tensors(gated)
        memo: dict[int, Any] = {}
        for name, empty in named_tensors(self.dense).items():
            if empty.is_meta and id(empty) not in memo:
                spread = _with_zeros(small[name].detach().clone(), cuts[name])
                memo[id(empty)] = _like(small[name], spread)
        empty_gates = self.dense.gates.gate_parameters()
        for name, values in _all_gates(gated, self.gate_count).items():
            memo[id(empty_gates[name])] = _like(empty_gates[name], values)
        whole: GatedModel = copy.deepcopy(self.dense, memo)
        for name, module in whole.named_modules():
            module.training = gated.get_submodule(name).training
        whole.gates.frozen, whole.gates.rule = gated.gates.frozen, gated.gates.rule
        return whole.to(gated.gates.device)


CANNOT_COME_BACK = "removed units cannot come back: shrink a new dense model"


def plan_so_far(gated: GatedModel) -> CompactionPlan:
    """The plan that leads from the dense model to the present one."""
    history = _recorded(gated)
    nothing = CompactionPlan(type(gated.model).__name__, {}, ())
    return nothing if history is None else history.plan


def dense_indices(gated: GatedModel) -> Tensor:
    """The index that every gate had in the dense model."""
    if gated.gates.original is None:
        return torch.arange(gated.gates.count, device=gated.gates.device)
    return gated.gates.original


def dense_values(gated: GatedModel, values: Tensor) -> Tensor:
    """Values of the gates for the dense model: 0 for each removed unit."""
    history = _recorded(gated)
    if history is None:
        return values
    return values.new_zeros(history.gate_count).index_copy(0, dense_indices(gated), values)


def dense_model(gated: GatedModel) -> GatedModel:
    """The dense model of a shrunk one, a copy.

    A model that lost no unit is dense: it is returned as it is, and must not be changed.
    """
    history = _recorded(gated)
    return gated if history is None else history.dense_copy(gated)


def positions_in(known: Tensor, numbers: Tensor) -> Tensor:
    """Where each wanted number is among the known ones; both rise."""
    positions = torch.searchsorted(known, numbers)
    inside = positions < len(known)
    if not inside.all() or not torch.equal(known[positions], numbers):
        raise CompactionError(CANNOT_COME_BACK)
    return positions


def _recorded(gated: GatedModel) -> ShrinkHistory | None:
    history = gated.shrink_history
    return history if isinstance(history, ShrinkHistory) else None


def _without_numbers(gated: GatedModel) -> GatedModel:
    """A copy with all tensors on the meta device."""
    gates = gated.gates
    tensors = [*named_tensors(gated.model).values(), *gates.parameters(), *gates.buffers()]
    memo: dict[int, Any] = {id(t): _like(t, t.detach().to("meta")) for t in tensors}
    return copy.deepcopy(gated, memo)


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _all_gates(gated: GatedModel, gate_count: int) -> dict[str, Tensor]:
    """The parameters of all gates of the dense model, those of removed units closed."""
    bank, places = gated.gates, dense_indices(gated)
    none = torch.zeros(gate_count, dtype=torch.bool, device=bank.device)
    removed = bank.family.removed(none)
    return {
        name: removed[name].to(values.dtype).index_copy(0, places, values.detach())
        for name, values in bank.gate_parameters().items()
    }


def _with_zeros(tensor: Tensor, cuts: Iterable[Cut]) -> Tensor:
    """A tensor of the dense size: kept indices where they were, zeros between them."""
    for cut in reversed([*cuts]):
        shape = [*tensor.shape]
        shape[cut.dim] = cut.size
        kept = torch.tensor(cut.kept, dtype=torch.int64, device=tensor.device)
        tensor = tensor.new_zeros(shape).index_copy(cut.dim, kept, tensor)
    return tensor
