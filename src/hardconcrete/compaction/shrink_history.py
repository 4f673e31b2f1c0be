"""What a model was before units were removed in training: its dense self, without numbers."""

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction.plan import CompactionPlan, Cut
from hardconcrete.gating import GatedModel
from hardconcrete.graph.propagate import named_tensors

KEY = "_hardconcrete_shrunk"
"""Where a shrunk model keeps this: in its ``__dict__``, unseen by the module system."""

SHUT = -100.0
"""The location of a gate whose unit is gone."""


@dataclass(frozen=True, eq=False)
class ShrinkHistory:
    """A dense model and what is left of it. Nothing in it changes, so all copies share it.

    Args:
        dense: as it was, its parameters and buffers on the meta device.
        plan: what was cut from it.
    """

    dense: GatedModel
    plan: CompactionPlan

    def __deepcopy__(self, _: Any) -> "ShrinkHistory":
        return self

    @property
    def gates(self) -> int:
        """How many gates there were."""
        return len(self.dense.gates.log_alpha)


def history_of(gated: GatedModel) -> ShrinkHistory:
    """What a model has become; of a dense one nothing was cut."""
    known = gated.__dict__.get(KEY)
    if isinstance(known, ShrinkHistory):
        return known
    _ = gated.ledger  # costs are those of the dense model, also when it is no more
    return ShrinkHistory(_hollow(gated), cut_so_far(gated))


def cut_so_far(gated: GatedModel) -> CompactionPlan:
    """The plan that leads from the dense model to the present one."""
    known = gated.__dict__.get(KEY)
    nothing = CompactionPlan(type(gated.model).__name__, {}, ())
    return known.plan if isinstance(known, ShrinkHistory) else nothing


def _hollow(gated: GatedModel) -> GatedModel:
    """A copy without numbers."""
    tensors = [*named_tensors(gated.model).values(), *gated.gates.parameters()]
    memo: dict[int, Any] = {id(t): _like(t, t.detach().to("meta")) for t in tensors}
    return copy.deepcopy(gated, memo)


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def among_all(gated: GatedModel, values: Tensor) -> Tensor:
    """Values of the gates, with 0 for those whose units were removed."""
    if gated.gates.original is None:
        return values
    return values.new_zeros(history_of(gated).gates).index_copy(0, gated.gates.original, values)


def expanded(gated: GatedModel) -> GatedModel:
    """A dense copy: what was removed is zero, and its gates are shut.

    A model of which nothing was removed is dense itself, and no copy: it must not be changed.
    """
    known = gated.__dict__.get(KEY)
    if known is None:
        return gated
    cuts = defaultdict[str, list[Cut]](list)
    for cut in known.plan.cuts:
        cuts[f"model.{cut.tensor}"].append(cut)
    left = named_tensors(gated)
    memo: dict[int, Any] = {}
    for name, hollow in named_tensors(known.dense).items():
        if hollow.is_meta and id(hollow) not in memo:
            memo[id(hollow)] = _like(left[name], _spread(left[name].detach().clone(), cuts[name]))
    log_alpha = known.dense.gates.log_alpha
    memo[id(log_alpha)] = nn.Parameter(_all_locations(gated, known.gates))
    whole: GatedModel = copy.deepcopy(known.dense, memo)
    for name, module in whole.named_modules():
        module.training = gated.get_submodule(name).training
    whole.gates.frozen, whole.gates.rule = gated.gates.frozen, gated.gates.rule
    return whole.to(gated.gates.log_alpha.device)


def _spread(tensor: Tensor, cuts: list[Cut]) -> Tensor:
    """Every index at its old place, zeros in between."""
    for cut in reversed(cuts):
        shape = [*tensor.shape]
        shape[cut.dim] = cut.size
        kept = torch.tensor(cut.kept, dtype=torch.int64, device=tensor.device)
        tensor = tensor.new_zeros(shape).index_copy(cut.dim, kept, tensor)
    return tensor


def _all_locations(gated: GatedModel, gates: int) -> Tensor:
    own = gated.gates.log_alpha.detach()
    original: Any = gated.gates.original
    return own.new_full((gates,), SHUT).index_copy(0, original, own)
