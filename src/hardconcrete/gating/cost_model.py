"""What a gated model costs: which gate every index of every parameter has."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hardconcrete.cost.example_inputs import batch_size
from hardconcrete.cost.latency.table import LatencyTable, time_operations
from hardconcrete.cost.ledger import Ledger
from hardconcrete.cost.ledger_writer import write_ledger
from hardconcrete.cost.liveness_formulas import EACH
from hardconcrete.gating.attach import plain_copy
from hardconcrete.graph.propagate import first_names
from hardconcrete.units.group import Place

if TYPE_CHECKING:
    from hardconcrete.gating.gated_model import GatedModel


def ledger_of(gated: "GatedModel") -> Ledger:
    """Written for a copy without gates."""
    plain = plain_copy(gated)
    ledger = write_ledger(plain, gated.example, gate_places(gated), gated.look_at(plain))
    return ledger.to(gated.gates.log_alpha.device)


def latency_of(gated: "GatedModel", **settings: Any) -> LatencyTable:
    """Measured on a copy without gates."""
    plain, example = plain_copy(gated), gated.example
    as_attached = settings.get("batch") in (None, batch_size(example))
    found = gated.look_at(plain) if as_attached else None
    table = time_operations(plain, example, gate_places(gated), labelled=found, **settings)
    return table.to(gated.gates.log_alpha.device)


def gate_places(gated: "GatedModel") -> dict[Place, Tensor]:
    """The number of the gate of every index of the axes that are gated, -1 where it has none.

    Of a parameter with gates on single weights, the gate of each; ``EACH`` stands for the axis.
    """
    names = first_names(gated.model)
    parameters = dict(gated.model.named_parameters(remove_duplicate=False))
    places: dict[Place, Tensor] = {}
    for group in gated.groups:
        for axis in group.axes:
            if axis.dim is None:
                numbers = torch.arange(group.start, group.start + group.units)
                shape = parameters[axis.parameter].shape
                places[names[axis.parameter], EACH] = numbers.view(shape)
            else:
                units = torch.arange(group.units) if axis.units is None else axis.units.cpu()
                place = names[axis.parameter], axis.dim
                before = places.get(place, torch.full_like(units, -1))
                places[place] = torch.where(units >= 0, units + group.start, before)
    return places
