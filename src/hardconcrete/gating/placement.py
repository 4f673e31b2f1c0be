"""Which gates multiply which parameters of which module."""

from collections import defaultdict

import torch
from torch import nn

from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.class_swap import swap
from hardconcrete.gating.module_gates import ModuleGates, Multiplier
from hardconcrete.units import Axis, Group
from hardconcrete.units.axis import NO_UNIT


def put_gates_on(model: nn.Module, groups: tuple[Group, ...], bank: GateBank) -> None:
    """Gate a model by groups of which some units were removed from the bank."""
    bank.tables.clear()
    bank.sizes = tuple(group.units for group in groups)
    for module, multipliers in placements(model, groups, bank).items():
        swap(module, ModuleGates(bank, tuple(multipliers)))


def placements(
    model: nn.Module, groups: tuple[Group, ...], bank: GateBank
) -> dict[nn.Module, list[Multiplier]]:
    """The multipliers of every module. A tied parameter is gated under all of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sharing: dict[tuple[str, int | None], list[tuple[Group, Axis]]] = defaultdict(list)
    for group in groups:
        for axis in group.gated:
            sharing[axis.tensor, axis.dim].append((group, axis))
    placed: dict[nn.Module, list[Multiplier]] = defaultdict(list)
    for (name, dim), gated_axes in sharing.items():
        index = _add_table(bank, gated_axes)
        numbers = tuple(group.index for group, _ in gated_axes)
        first = next(alias for alias, tensor in parameters.items() if tensor is parameters[name])
        for alias, tensor in parameters.items():
            if tensor is parameters[name]:
                path, _, attribute = alias.rpartition(".")
                label = gated_axes[0][0].name
                multiplier = Multiplier(attribute, dim, numbers, index, label, first)
                owner = placed[model.get_submodule(path)]
                if not any((m.parameter, m.dim) == (attribute, dim) for m in owner):
                    owner.append(multiplier)
    return dict(placed)


def _add_table(bank: GateBank, gated_axes: list[tuple[Group, Axis]]) -> int | None:
    """Add a table with the gate of every index; None if each index has one gate.

    The last number stands for no gate.
    """
    if len(gated_axes) == 1 and gated_axes[0][1].is_one_to_one:
        return None
    last = sum(group.units for group, _ in gated_axes)
    index, start = torch.full_like(gated_axes[0][1].units, last), 0
    for group, axis in gated_axes:
        gates = axis.expand(torch.arange(start, start + group.units), fill=NO_UNIT)
        index = torch.where(gates >= 0, gates, index)
        start += group.units
    bank.tables.append(index.to(bank.device))
    return len(bank.tables) - 1
