"""What multiplies the parameters of a gated module."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hardconcrete.errors import GateError
from hardconcrete.gating.bank import GateBank, Values
from hardconcrete.gating.groups import Group

KEY = "_hardconcrete"
"""Where a gated module keeps its gates: in its ``__dict__``, unseen by the module system."""


@dataclass(frozen=True)
class Multiplier:
    """One group's gates on one parameter of a module."""

    parameter: str
    dim: int | None
    group: Group

    def __call__(self, parameter: Tensor, values: Values) -> Tensor:
        """The parameter times its gates."""
        z = values[self.group.index]
        if z.dim() > 1:
            raise GateError(
                f"{self.group.name}: a gate per example multiplies activations, and "
                f"{self.parameter} was read as a parameter; use sample='batch' for this site"
            )
        z = z.to(parameter.dtype)
        if self.dim is None:
            return parameter * z.view(parameter.shape)
        return parameter * z.view(-1, *[1] * (parameter.dim() - self.dim - 1))


@dataclass(frozen=True)
class ModuleGates:
    """All that multiplies the parameters of one module.

    Args:
        bank: where the values of the gates come from.
        multipliers: what multiplies which parameter.
        inner: index of the group that can multiply the input of this module instead.
        outer: index of the group that can multiply its output instead.
    """

    bank: GateBank
    multipliers: tuple[Multiplier, ...]
    inner: int | None = None
    outer: int | None = None

    def read(self, module: nn.Module, name: str) -> Tensor:
        """A parameter, times its gates."""
        value: Any = module._parameters[name]
        values = self.values(module, name)
        for multiplier in self.multipliers:
            if multiplier.parameter == name:
                value = multiplier(value, values)
        return value  # type: ignore[no-any-return]

    def values(self, module: nn.Module, *names: str) -> Values:
        """The values of all gates, as this module sees them now to read parameters ``names``."""
        if self.bank.seen is not None:
            self.bank.seen.update((module, name) for name in names)
        return self.bank.values(module.training)
