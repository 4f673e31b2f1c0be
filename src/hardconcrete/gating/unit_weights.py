"""The weights of each unit as the row of a matrix, read from a gated model and written back."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hardconcrete.gating.bank import noise_key
from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.graph.propagate import first_names
from hardconcrete.sparsifiers import UnitWeights
from hardconcrete.units import Axis, Group
from hardconcrete.units.group import raw_parameter


def unit_weights(gated: GatedModel) -> UnitWeights:
    """What the gates multiply, one row per unit, with gradients.

    Example:
        >>> import hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> unit_weights(hc.attach_gates(model, torch.zeros(2, 4))).sizes()   # inputs of the second
        tensor([2., 2., 2.])
    """
    parameters = dict(gated.model.named_parameters(remove_duplicate=False))
    rows = tuple(_rows(parameters, group) for group in gated.groups)
    bank = gated.gates.log_variances
    if bank is None:
        return UnitWeights(rows)
    first = first_names(gated.model)
    noise = {name: bank[noise_key(first[name])] for name in parameters if _has(bank, first[name])}
    return UnitWeights(rows, tuple(_rows(noise, group) for group in gated.groups))


@torch.no_grad()
def write_unit_weights(gated: GatedModel, weights: UnitWeights) -> None:
    """Write rows, as ``unit_weights`` gives them, into the parameters."""
    for group, rows in zip(gated.groups, weights.rows, strict=True):
        for axis in group.gated:
            parameter = raw_parameter(gated.model, axis.tensor)
            table = _by_index(axis, parameter)
            order = _order(axis, parameter)
            width = len(order) // group.units * table.shape[1]
            table[order] = rows[:, :width].reshape(len(order), -1).to(table.dtype)
            rows = rows[:, width:]
            along = parameter.movedim(axis.dim or 0, 0)
            along.copy_(table.view(along.shape))


def _has(bank: nn.ParameterDict, name: str) -> bool:
    return noise_key(name) in bank


def _rows(parameters: Mapping[str, Tensor], group: Group) -> Tensor:
    parts = []
    for axis in group.gated:
        parameter = parameters[axis.tensor]
        table = _by_index(axis, parameter)[_order(axis, parameter)]
        parts.append(table.reshape(group.units, -1))
    return torch.cat(parts, 1)


def _by_index(axis: Axis, parameter: Tensor) -> Tensor:
    """A row for each index of the axis; for each entry where every entry is a unit."""
    if axis.dim is None:
        return parameter.reshape(-1, 1).clone()
    return parameter.movedim(axis.dim, 0).reshape(parameter.shape[axis.dim], -1).clone()


def _order(axis: Axis, parameter: Tensor) -> Tensor:
    """The indices that belong to units, unit by unit: each has equally many."""
    units = axis.units.flatten()
    order = units.argsort(stable=True)
    return order[units[order] >= 0].to(parameter.device)
