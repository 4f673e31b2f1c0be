"""Masks that you bring: which units of each group stay."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel, attach_gates
from hardconcrete.gating.open_values import open_values
from hardconcrete.graph.model_state import detached_copy, random_state_kept
from hardconcrete.units import Group

Keep = Mapping[str, Any]
"""By name of the group a mask of bools, one for each unit, or the indices of the units to keep."""


def gated_copy(
    model: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any] | None
) -> GatedModel:
    """A copy of a plain model, with an open gate on every unit that can be removed.

    It shares the parameters.
    """
    with random_state_kept():
        return attach_gates(detached_copy(model, model.parameters()), example_inputs, kwargs)


def values_of(gated: GatedModel, keep: Keep, min_units: int) -> Tensor:
    """The value of every gate where these units stay.

    Groups that are not named keep what their gates say.

    Example:
        >>> import hardconcrete as hc
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4))
        >>> values_of(gated, {"0": [0, 2]}, min_units=1).tolist()
        [1.0, 0.0, 1.0]
    """
    if not isinstance(keep, Mapping):
        raise ArgumentError(
            "keep takes a mapping from names of groups to the units to keep, such as "
            f"{{'conv1': [0, 2, 3]}}, not a {type(keep).__name__}"
        )
    groups = {group.name: group for group in gated.groups}
    for name in keep:
        if name not in groups:
            raise ArgumentError(f"keep: {name!r} is not a group; the groups are {_list(groups)}")
    is_open = gated.gates.is_open()
    for name, units in keep.items():
        is_open[groups[name].slice] = _mask(groups[name], units, min_units).to(is_open.device)
    return torch.where(is_open, open_values(gated), 0.0)


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names)


def _mask(group: Group, units: Any, min_units: int) -> Tensor:
    """Which units of a group stay, from a mask or from indices."""
    where = f"keep[{group.name!r}]"
    try:
        wanted = torch.as_tensor(units).detach().cpu().to_dense()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{where} takes a mask of bools or the indices of units, not {_short(units)}"
        ) from error
    if wanted.dim() != 1:
        raise ArgumentError(
            f"{where} has {wanted.dim()} dimensions; it takes a mask of bools or indices in one"
        )
    if wanted.dtype == torch.bool:
        mask = wanted
        if len(mask) != group.units:
            raise ArgumentError(
                f"{where} is a mask of {len(mask)} bools, and the group has {group.units} units"
            )
    else:
        mask = _from_indices(where, wanted, group.units)
    kept, least = int(mask.sum()), min(min_units, group.units) if group.keeps_one else 0
    if kept < least:
        hint = "; min_units=0 lets a whole group go" if kept == 0 and min_units == 1 else ""
        raise ArgumentError(f"{where} keeps {kept} units, and min_units={min_units}{hint}")
    return mask


def _from_indices(where: str, indices: Tensor, units: int) -> Tensor:
    mask = torch.zeros(units, dtype=torch.bool)
    if not len(indices):
        return mask
    if indices.dtype == torch.uint8 or indices.is_floating_point() or indices.is_complex():
        raise ArgumentError(
            f"{where} has the type {indices.dtype}; a mask takes bools, and indices are int64"
        )
    indices = indices.long()  # torch does not compare all unsigned integers
    out_of_range = indices[(indices < 0) | (indices >= units)]
    if len(out_of_range):
        raise ArgumentError(
            f"{where} has the index {int(out_of_range[0])}, and the group has the units 0 to "
            f"{units - 1}"
        )
    found, counts = indices.unique(return_counts=True)
    if len(found) < len(indices):
        raise ArgumentError(
            f"{where} has the index {int(found[counts > 1][0])} more than once; a mask takes bools"
        )
    mask[indices] = True
    return mask


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
