"""The way down to limits: targets for what a gated model delivers, for cuts in stages."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hardconcrete.cost.ledger import Ledger
from hardconcrete.gating import GatedModel
from hardconcrete.gating.gated_model import LATENCY
from hardconcrete.importance.select import Costs, Selection
from hardconcrete.objective.constraint import Constraint, cheapest, delivered, expected


class Descent:
    """The costs of a gated model at a part of the way from what is open now to its limits.

    All costs come down geometrically, as parts of themselves.

    Example:
        >>> import hardconcrete as hc
        >>> from hardconcrete.objective.constraint import constraints
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
        >>> limits = constraints(gated, {"macs": 0.25}, None)
        >>> descent = Descent(gated, limits, torch.ones(8))
        >>> costs, _ = descent(0.5)
        >>> costs(torch.ones(8)).tolist()    # twice what is asked for half way down
        [2.0]
    """

    def __init__(self, gated: GatedModel, limits: Sequence[Constraint], is_open: Tensor) -> None:
        self.gated, self.limits = gated, limits
        self._copy: tuple[Ledger, Ledger] | None = None
        self.start = self._delivered(is_open, torch.ones(len(limits), dtype=torch.float64))
        parts = [limit.limit / limit.dense for limit in limits]
        self.end = torch.tensor(parts, dtype=torch.float64)

    @property
    def is_met(self) -> bool:
        """Whether nothing has to go."""
        return bool((self.start <= self.end).all())

    @property
    def depth(self) -> float:
        """By how much the largest excess must fall, as a logarithm."""
        return max((self.start / self.end).log().tolist(), default=0.0)

    def __call__(self, part: float, *, reopen: bool = True) -> tuple[Costs, Selection]:
        """The costs for ``select_units``, and what it may know of them.

        Args:
            part: 0 at the start, 1 at the limits.
            reopen: whether units that were closed earlier may open again where they fit.
        """
        if not self.limits:
            return lambda is_open: is_open.new_zeros(1), Selection()
        target = torch.maximum(self.start * (self.end / self.start) ** part, self.end)
        known = {group.name for group in self.gated.analysis or ()}
        alike = frozenset(k for k, group in enumerate(self.gated.groups) if group.name in known)
        smooth = partial(self._expected, target=target)
        settings = Selection(smooth, reopen, self._one_each, alike)
        return partial(self._delivered, target=target), settings

    def _delivered(self, is_open: Tensor, target: Tensor) -> Tensor:
        if not self.limits:
            return torch.zeros(0, dtype=torch.float64)
        ledger, is_open = self._ledger, is_open.to(self._device)
        return delivered(self.gated, self.limits, is_open, ledger=ledger).cpu() / target

    def _expected(self, gates: Tensor, target: Tensor) -> Tensor:
        ledger, gates = self._ledger, gates.to(self._device)
        return expected(self.gated, self.limits, gates, ledger=ledger).cpu() / target

    @property
    def _device(self) -> torch.device:
        """The CPU: selection takes many small steps, which a GPU is slow at.

        A latency table stays on its device.
        """
        timed = any(limit.name == LATENCY for limit in self.limits)
        return self.gated.gates.log_alpha.device if timed else torch.device("cpu")

    @property
    def _ledger(self) -> Ledger | None:
        """The model's ledger there; ``shrink`` gives the model a new one."""
        if all(limit.kind is None for limit in self.limits):
            return None
        ledger = self.gated.ledger
        if self._copy is None or self._copy[0] is not ledger:
            self._copy = ledger, ledger.to(self._device)
        return self._copy[1]

    def _one_each(self, is_open: Tensor) -> Iterator[Tensor]:
        """With the cheapest unit of each group alone, by each limit; single weights stay."""
        units = torch.zeros_like(is_open)
        for group in self.gated.groups:
            units[group.slice] = float(group.keeps_one)
        for limit in self.limits:
            kind = () if limit.kind is None else (limit.kind,)
            yield torch.where(units > 0, cheapest(self.gated, *kind).double().cpu(), is_open)
