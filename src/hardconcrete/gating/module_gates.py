"""What multiplies the parameters of a gated module."""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import GateError
from hardconcrete.gating.bank import GateBank, Values
from hardconcrete.gating.checkpointing import in_backward

CALLS = ("_call_impl", "forward")
"""Functions of a module that run while it is called."""

KEY = "_hardconcrete"
"""Where a gated module keeps its gates: in its ``__dict__``, hidden from the module system."""


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Gates on one dimension of one parameter of a module.

    Args:
        parameter: its name in the module.
        dim: the dimension, None for single weights.
        groups: numbers of the groups whose gates these are.
        index: number of the bank's table that says which gate each index has; None for one each.
        name: of the first group, for messages.
        tensor: first name of the parameter in the model.
    """

    parameter: str
    dim: int | None
    groups: tuple[int, ...]
    index: int | None
    name: str
    tensor: str = ""

    def gates(self, bank: GateBank, values: Values) -> Tensor:
        """One gate for every index along the dimension."""
        if self.index is None:
            return values[self.groups[0]]
        gates = [values[group] for group in self.groups]
        open_gate = torch.ones_like(gates[0][..., :1])  # for indices that belong to no unit
        return torch.cat([*gates, open_gate], -1).index_select(-1, bank.tables[self.index])

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
        inner: the multiplier that can multiply the input of this module instead.
        outer: the multipliers that can multiply its output instead.
    """

    bank: GateBank
    multipliers: tuple[Multiplier, ...]
    inner: Multiplier | None = None
    outer: tuple[Multiplier, ...] = ()

    def read(self, module: nn.Module, name: str) -> Tensor:
        """A parameter, times its gates; in training, outside of all calls, the parameter itself.

        In evaluation a sharded parameter is read raw there, too: sharding looks at it before calls.
        """
        value: Any = module._parameters[name]
        raw = module.training or hasattr(value, "device_mesh")
        if self.bank.held is None and raw and self._is_outside_calls(module):
            return value  # type: ignore[no-any-return]
        values = self.values(module, name)
        noise = self.noise(module, name)
        if noise is not None:
            value = value + (0.5 * noise).exp().to(value.dtype) * torch.randn_like(value)
        for multiplier in self.multipliers:
            if multiplier.parameter == name:
                value = multiplier.times(value, self.bank, values)
        return value  # type: ignore[no-any-return]

    def noise(self, module: nn.Module, name: str) -> Tensor | None:
        """The log-variances of the noise that a parameter has now, if it has any."""
        for multiplier in self.multipliers if self.bank.log_variances is not None else ():
            if multiplier.parameter == name:
                return self.bank.noise_of(multiplier.tensor, module.training)
        return None

    def values(self, module: nn.Module, *names: str) -> Values:
        """The values of all gates with which this module multiplies parameters ``names`` now."""
        if self.bank.seen is not None:
            self.bank.seen.update((module, name) for name in names)
        return self.bank.values(module.training)

    def _is_outside_calls(self, module: nn.Module) -> bool:
        """Whether a tool reads a parameter, and no forward without a draw.

        A forward that reads it is on the stack. The stack is searched only outside of draws.
        """
        if torch.compiler.is_compiling() or in_backward():
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name in CALLS:
                called = _first_argument(frame)
                if isinstance(called, nn.Module):
                    parts = [*called.modules()]
                    if module in parts and self.bank not in parts:  # else it is a GatedModel
                        return False
            frame = frame.f_back
        return True


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None
