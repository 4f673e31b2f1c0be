"""The costs of a gated model: which gate each index of each parameter has."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hardconcrete.cost.example_inputs import batch_size
from hardconcrete.cost.latency.table import LatencyTable, time_operations
from hardconcrete.cost.ledger import Ledger
from hardconcrete.cost.ledger_writer import write_ledger
from hardconcrete.cost.liveness_formulas import EACH
from hardconcrete.gating.class_swap import plain_copy
from hardconcrete.graph.propagate import first_names
from hardconcrete.units.axis import NO_UNIT, Place

if TYPE_CHECKING:
    from hardconcrete.gating.gated_model import GatedModel


def ledger_of(gated: "GatedModel") -> Ledger:
    """The ledger of the model without gates, by its gates."""
    plain = plain_copy(gated, shared=gated.parameters())
    may_empty = [group.name for group in gated.groups if group.may_empty]
    places, analysis = gate_places(gated), gated.analyze(plain)
    ledger = write_ledger(plain, gated.example, places, analysis, may_empty)
    return ledger.to(gated.gates.device)


def latency_of(gated: "GatedModel", **settings: Any) -> LatencyTable:
    """Latency measured on a copy without gates, by its gates."""
    plain, example = plain_copy(gated, shared=gated.parameters()), gated.example
    as_attached = settings.get("batch") in (None, batch_size(example))
    analysis = gated.analyze(plain) if as_attached else None
    table = time_operations(plain, example, gate_places(gated), analysis=analysis, **settings)
    return table.to(gated.gates.device)


def gate_places(gated: "GatedModel") -> dict[Place, Tensor]:
    """The gate number of every index of each gated axis, -1 where it has no gate.

    ``EACH`` stands in place of the axis where every single weight has a gate.
    """
    names = first_names(gated.model)
    places: dict[Place, Tensor] = {}
    for group in gated.groups:
        numbers = torch.arange(group.start, group.start + group.units)
        for axis in group.gated:
            gates = axis.expand(numbers, fill=NO_UNIT)
            place = names[axis.tensor], EACH if axis.dim is None else axis.dim
            places[place] = torch.where(gates >= 0, gates, places.get(place, gates))
    return places
