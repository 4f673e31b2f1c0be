"""The weights of each unit as the row of a matrix, read from a gated model and written back."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.gating.weight_noise import noise_key
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
    keys = {name: noise_key(first[name]) for name in parameters}
    noise = {name: bank[key] for name, key in keys.items() if key in bank}
    return UnitWeights(rows, tuple(_rows(noise, group) for group in gated.groups))


@torch.no_grad()
def change_unit_weights(
    gated: GatedModel, group: Group, change: Callable[[Tensor], Tensor]
) -> None:
    """Replace the weights of a group, one row per unit, in place.

    Groups may share weights, so each is read again after the one before it was written.

    Example:
        >>> import hardconcrete as hc
        >>> layer = torch.nn.Linear(4, 3)
        >>> gated = hc.attach_gates(layer, torch.zeros(2, 4), sites=[":in"])
        >>> change_unit_weights(gated, gated.groups[0], torch.ones_like)
        >>> hc.remove_gates(gated).weight.sum().item()
        12.0
    """
    rows = change(_rows(dict(gated.model.named_parameters(remove_duplicate=False)), group))
    for axis in group.gated:
        parameter = raw_parameter(gated.model, axis.tensor)
        table, order = _by_index(axis, parameter), _order(axis, parameter)
        width = len(order) // group.units * table.shape[1]
        table[order] = rows[:, :width].reshape(len(order), -1).to(table.dtype)
        rows = rows[:, width:]
        along = parameter.movedim(axis.dim or 0, 0)
        along.copy_(table.view(along.shape))


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
