"""Targets for the delivered costs of a gated model on its way from dense to its limits."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hardconcrete.cost.ledger import Ledger
from hardconcrete.gating import GatedModel
from hardconcrete.gating.costs import LATENCY
from hardconcrete.importance.select import Costs, SelectionSettings
from hardconcrete.objective.constraint import Constraint, cheapest_mask, delivered, expected


class CostTargets:
    """The costs of a gated model, relative to targets that fall to the limits.

    Each target falls geometrically: by the same factor for the same progress.

    Attributes:
        start: each cost at the start, as a fraction of its dense total.
        end: each limit, as a fraction of the dense total.

    Example:
        >>> import hardconcrete as hc
        >>> from hardconcrete.objective.constraint import constraints
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
        >>> limits = constraints(gated, {"macs": 0.25}, None)
        >>> targets = CostTargets(gated, limits, torch.ones(8))
        >>> costs, _ = targets(0.5)
        >>> costs(torch.ones(8)).tolist()    # twice the target of half way
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
        """Whether the start is within all limits."""
        return bool((self.start <= self.end).all())

    @property
    def log_reduction(self) -> float:
        """The logarithm of the largest factor by which a cost must fall."""
        return max((self.start / self.end).log().tolist(), default=0.0)

    def __call__(self, progress: float, *, reopen: bool = True) -> tuple[Costs, SelectionSettings]:
        """The costs for ``select_units``, as fractions of their targets, and its settings.

        Args:
            progress: 0 at the start, 1 at the limits.
            reopen: whether units that were closed earlier may open again if they fit.
        """
        if not self.limits:
            return lambda is_open: is_open.new_zeros(1), SelectionSettings()
        target = torch.maximum(self.start * (self.end / self.start) ** progress, self.end)
        traced = {group.name for group in self.gated.analysis or ()}
        equal_cost = (k for k, group in enumerate(self.gated.groups) if group.name in traced)
        smooth = partial(self._expected, target=target)
        settings = SelectionSettings(smooth, reopen, self._cheapest_masks, frozenset(equal_cost))
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
        """Where costs are computed: on the CPU, because selection takes many small steps.

        A latency table stays on its device.
        """
        timed = any(limit.name == LATENCY for limit in self.limits)
        return self.gated.gates.device if timed else torch.device("cpu")

    @property
    def _ledger(self) -> Ledger | None:
        """A copy of the model's ledger on that device; a new one after ``shrink``."""
        if all(limit.kind is None for limit in self.limits):
            return None
        ledger = self.gated.ledger
        if self._copy is None or self._copy[0] is not ledger:
            self._copy = ledger, ledger.to(self._device)
        return self._copy[1]

    def _cheapest_masks(self, is_open: Tensor) -> Iterator[Tensor]:
        """For each limit, the mask with only the cheapest unit of each group.

        Single weights stay as they are.
        """
        units = torch.zeros_like(is_open)
        for group in self.gated.groups:
            units[group.slice] = float(not group.of_weights)
        for limit in self.limits:
            kind = () if limit.kind is None else (limit.kind,)
            yield torch.where(units > 0, cheapest_mask(self.gated, *kind).double().cpu(), is_open)
