"""What multiplies the parameters of a gated module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import GateError
from hardconcrete.gating.bank import GateBank, Values

KEY = "_hardconcrete"
"""Where a gated module keeps its gates: in its ``__dict__``, unseen by the module system."""


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Gates on one dimension of one parameter of a module.

    Args:
        parameter: its name in the module.
        dim: the dimension, None for single weights.
        groups: numbers of the groups whose gates these are.
        index: number of the bank's table that says which gate each index has; None for one each.
        name: of the first group, for messages.
    """

    parameter: str
    dim: int | None
    groups: tuple[int, ...]
    index: int | None
    name: str

    def gates(self, bank: GateBank, values: Values) -> Tensor:
        """One gate for every index along the dimension."""
        if self.index is None:
            return values[self.groups[0]]
        own = [values[group] for group in self.groups]
        open_gate = torch.ones_like(own[0][..., :1])  # for indices that belong to no unit
        return torch.cat([*own, open_gate], -1).index_select(-1, bank.tables[self.index])

    def times(self, parameter: Tensor, bank: GateBank, values: Values) -> Tensor:
        """The parameter times its gates."""
        z = self.gates(bank, values)
        if z.dim() > 1:
            raise GateError(
                f"{self.name}: a gate per example multiplies activations, and "
                f"{self.parameter} was read as a parameter; use sample='batch' for this site"
            )
        z = z.to(parameter.dtype)
        if self.dim is None:
            return parameter * z.view(parameter.shape)
        return parameter * z.view(-1, *[1] * (parameter.dim() - self.dim - 1))


@dataclass(frozen=True, slots=True)
class ModuleGates:
    """All that multiplies the parameters of one module.

    Args:
        bank: where the values of the gates come from.
        multipliers: what multiplies which parameter.
        inner: the one that can multiply the input of this module instead.
        outer: those that can multiply its output instead.
    """

    bank: GateBank
    multipliers: tuple[Multiplier, ...]
    inner: Multiplier | None = None
    outer: tuple[Multiplier, ...] = ()

    def read(self, module: nn.Module, name: str) -> Tensor:
        """A parameter, times its gates."""
        value: Any = module._parameters[name]
        values = self.values(module, name)
        for multiplier in self.multipliers:
            if multiplier.parameter == name:
                value = multiplier.times(value, self.bank, values)
        return value  # type: ignore[no-any-return]

    def values(self, module: nn.Module, *names: str) -> Values:
        """The values of all gates, as this module sees them now to read parameters ``names``."""
        if self.bank.seen is not None:
            self.bank.seen.update((module, name) for name in names)
        return self.bank.values(module.training)
