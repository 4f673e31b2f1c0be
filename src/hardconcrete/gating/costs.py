"""Costs of a gated model: the mean over draws of its gates, and by their readout."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardconcrete.cost.latency.table import LatencyTable
from hardconcrete.cost.ledger import KINDS, Ledger
from hardconcrete.errors import ArgumentError, GateError, TraceError
from hardconcrete.gating.cost_model import latency_of, ledger_of

if TYPE_CHECKING:
    from hardconcrete.gating.gated_model import GatedModel

LATENCY = "latency_ms"
"""The name of the measured cost."""

GROUP_SIZE = "group_size"
"""The paper's uncoupled number of weights."""

KEY_VALUES = "kv_bytes"
"""Keys and values per token: the only cost of the ledger that some models lack."""

UNCLEAR_KEY_VALUES = (
    "kv_bytes cannot be determined: the keys and values of this model could not be told from "
    "other tensors in its traced graph; use macs or params, or units of its heads, instead"
)


@dataclass
class CostTables:
    """What was measured of a model so far.

    Args:
        ledger: parameters, multiply-adds and bytes by gates.
        latency: milliseconds by gates.
    """

    ledger: Ledger | None = None
    latency: LatencyTable | None = None

    def to(self, device: torch.device) -> None:
        """Move the ledger to another device, and drop the latencies of the old one."""
        if self.ledger is not None:
            self.ledger = self.ledger.to(device)
        if self.latency is not None and self.latency.selects.device != device:
            self.latency = None


class GatedCosts:
    """The costs of a gated model, as ``gated.costs``.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
        >>> _ = gated.gates.log_alpha.data.copy_(torch.tensor([-9.0, 9.0, 9.0]))
        >>> gated.costs.dense("params"), gated.costs.delivered("params").item()
        (23.0, 16.0)
        >>> print(gated.costs)
        params: 69.6% expected, 69.6% delivered, of 23
        macs: 66.7% expected, 66.7% delivered, of 36
        weight_bytes: 69.6% expected, 69.6% delivered, of 92
    """

    def __init__(self, gated: "GatedModel", tables: CostTables) -> None:
        self._gated, self._tables = gated, tables

    @property
    def ledger(self) -> Ledger:
        """Costs by gates. The first access traces the model."""
        if self._tables.ledger is None:
            if torch.compiler.is_compiling():
                raise GateError(
                    "costs need a trace of the model: call gated.expected('macs') once before "
                    "compiling"
                )
            with torch.inference_mode(False):  # it will be differentiated elsewhere
                self._tables.ledger = ledger_of(self._gated)
        return self._tables.ledger

    @property
    def latency(self) -> LatencyTable:
        """Times by gates. The first access measures them with default settings."""
        table = self._tables.latency
        return self.measure_latency() if table is None else table

    @property
    def has_latency(self) -> bool:
        """Whether times were measured. They hold for the widths of the model at that time."""
        return self._tables.latency is not None

    def measure_latency(
        self, *, batch: int | None = None, repeats: int | None = None, fresh: bool = False
    ) -> LatencyTable:
        """Time every operator over a grid of widths; see ``GatedModel.measure_latency``."""
        if torch.compiler.is_compiling():
            raise GateError(
                "latency is measured: call gated.measure_latency() once before compiling"
            )
        with torch.inference_mode(False):  # it will be differentiated elsewhere
            table = latency_of(self._gated, batch=batch, repeats=repeats, fresh=fresh)
        self._tables.latency = table
        return table

    def dense(self, cost: str) -> float:
        """The cost of the model without gates."""
        if cost == GROUP_SIZE:
            return float(sum(group.dense_units * group.size for group in self._gated.groups))
        if cost == LATENCY:
            return float(self.latency.dense)
        return float(self.ledger.dense[self._kind(cost)])

    def expected(self, cost: str) -> Tensor:
        """The mean over draws of the gates; see ``GatedModel.expected``."""
        probability = self._gated.gates.open_probability()
        if cost == GROUP_SIZE:
            return (probability * self._group_sizes()).sum()
        if cost == LATENCY:
            return self.latency.expected(probability)
        return self.ledger.mean(probability)[self._kind(cost)]

    def delivered(self, cost: str) -> Tensor:
        """The cost of the compacted model; see ``GatedModel.delivered``."""
        with torch.no_grad():  # as a decorator, compiled code could not call it
            is_open = self._gated.gates.is_open()
            if cost == GROUP_SIZE:
                return (is_open * self._group_sizes()).sum()
            if cost == LATENCY:
                return self.latency.delivered(is_open)
            return self.ledger.cost(is_open)[self._kind(cost)]

    def __str__(self) -> str:
        try:
            dense = self.ledger.dense.tolist()
        except TraceError as error:
            return f"costs are not known: {error}"
        return "\n".join(
            f"{kind}: {self.expected(kind).item() / whole:.1%} expected, "
            f"{self.delivered(kind).item() / whole:.1%} delivered, of {whole:,.0f}"
            for kind, whole in zip(KINDS, dense, strict=True)
            if whole > 0  # no keys and values, or unknown ones
        )

    def _kind(self, cost: str) -> int:
        """The place of a cost in the ledger; one that could not be determined is refused."""
        if cost not in KINDS:
            known = ", ".join(map(repr, (*KINDS, GROUP_SIZE, LATENCY)))
            raise ArgumentError(f"cost={cost!r} is not known; use one of {known}")
        kind = KINDS.index(cost)
        if cost == KEY_VALUES and bool(self.ledger.dense[kind].isnan()):
            raise GateError(UNCLEAR_KEY_VALUES)
        return kind

    def _group_sizes(self) -> Tensor:
        """|g| of every gate."""
        groups, device = self._gated.groups, self._gated.gates.device
        sizes = [torch.full((group.units,), group.size, dtype=torch.float64) for group in groups]
        return torch.cat(sizes).to(device)
