"""A gated model cut to what its history leaves, in place, while it is trained."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from hardconcrete.compaction.input_selection import read_all_inputs
from hardconcrete.compaction.module_form import cut_module
from hardconcrete.compaction.shrink_history import (
    ShrinkHistory,
    dense_indices,
    plan_so_far,
    positions_in,
)
from hardconcrete.compaction.tensor_cuts import TensorCutter
from hardconcrete.gating import GatedModel, remove_gates
from hardconcrete.gating.placement import put_gates_on
from hardconcrete.gating.weight_noise import noise_key


def apply_shrink(
    gated: GatedModel, after: ShrinkHistory, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Cut parameters, buffers, gates and the state of optimizers.

    Args:
        gated: changes; its gates are taken off and put on again.
        after: the history that the model has then.
        optimizers: those that train the model.
    """
    before, cutter = plan_so_far(gated), TensorCutter(optimizers)
    groups, original = after.remaining_groups()
    step = after.plan_after(before)
    kept = positions_in(dense_indices(gated), original.to(gated.gates.device))
    model, bank = remove_gates(gated), gated.gates
    for path in before.selections.keys() - after.plan.selections.keys():
        read_all_inputs(model.get_submodule(path))
    cut_module(step, model, cutter)
    for parameter in bank.gate_parameters().values():
        cutter(parameter, 0, kept)
    noise = {} if bank.log_variances is None else dict(bank.log_variances)
    for cut in step.cuts:
        if noise_key(cut.tensor) in noise:
            cutter(noise[noise_key(cut.tensor)], cut.dim, torch.tensor(cut.kept))
    bank.original = original.to(kept.device)
    bank.checks = None if bank.checks is None else bank.checks[kept]
    ledger = after.dense.ledger.for_remaining(original, after.gate_count).to(kept.device)
    gated.regroup(groups, ledger)
    put_gates_on(model, groups, bank)
    gated.shrink_history = after
