"""What multiplies the parameters of a gated module."""

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.errors import GateError
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.checkpointing import in_backward
from hardconcrete.gating.holding import Values
from hardconcrete.gating.products import times_gates, times_open_gates
from hardconcrete.gating.weight_noise import noise_key

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

    def is_one(self, values: Values, at_one: frozenset[int]) -> bool:
        """Whether all these gates are 1 for certain, and get no gradient: they can be left out."""
        return at_one.issuperset(self.groups) and not values[self.groups[0]].requires_grad

    def times(
        self, parameter: Tensor, bank: GateBank, values: Values, at_one: frozenset[int]
    ) -> Tensor:
        """The parameter times its gates.

        Args:
            parameter: the parameter, or its product with other gates.
            bank: the gates.
            values: their values, by group.
            at_one: groups whose gates are all 1 for certain.
        """
        if self.is_one(values, at_one):
            return parameter
        z = self.gates(bank, values)
        if z.dim() > 1:
            raise GateError(
                f"{self.name}: a gate per example multiplies activations, and "
                f"{self.parameter} was read as a parameter; use sample='batch' for this site"
            )
        trailing = () if self.dim is None else (1,) * (parameter.dim() - self.dim - 1)
        shape = parameter.shape if self.dim is None else (-1, *trailing)
        z = z.to(parameter.dtype).view(shape)
        multiplied = times_open_gates if at_one.issuperset(self.groups) else times_gates
        return multiplied(parameter, z)


@dataclass(frozen=True, slots=True)
class ModuleGates:
    """All that multiplies the parameters of one module.

    Args:
        bank: where the values of the gates come from.
        multipliers: what multiplies which parameter.
        inner: the multiplier that can multiply the input of this module instead.
        outer: the multipliers that can multiply its output instead.
        groups: numbers of all groups whose gates these are.
    """

    bank: GateBank
    multipliers: tuple[Multiplier, ...]
    inner: Multiplier | None = None
    outer: tuple[Multiplier, ...] = ()
    groups: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        groups = (group for each in self.multipliers for group in each.groups)
        object.__setattr__(self, "groups", frozenset(groups))

    def read(self, module: nn.Module, name: str) -> Tensor:
        """A parameter, times its gates; in training, outside of all calls, the parameter itself.

        In evaluation a sharded parameter is read raw there, too: sharding looks at it before calls.
        """
        value: Any = module._parameters[name]
        if module.training and self.bank.can_be_left_out(self.groups):
            return value  # type: ignore[no-any-return]
        raw = module.training or hasattr(value, "device_mesh")
        if self.bank.held is None and raw and self._is_outside_calls(module):
            return value  # type: ignore[no-any-return]
        values, at_one = self.values(module, name)
        noise = self.noise(module, name)
        if noise is not None:
            value = value + (0.5 * noise).exp().to(value.dtype) * torch.randn_like(value)
        for multiplier in self.multipliers:
            if multiplier.parameter == name:
                value = multiplier.times(value, self.bank, values, at_one)
        return value  # type: ignore[no-any-return]

    def noise(self, module: nn.Module, name: str) -> Tensor | None:
        """The log-variances of the noise that a parameter has now, if it has any."""
        noise = self.bank.log_variances
        if noise is None or not module.training or self.bank.frozen:
            return None
        named = (each.tensor for each in self.multipliers if each.parameter == name)
        tensor = next(named, None)
        return None if tensor is None else noise[noise_key(tensor)]

    def values(self, module: nn.Module, *names: str) -> tuple[Values, frozenset[int]]:
        """The values of all gates with which this module multiplies parameters ``names`` now.

        And the numbers of the groups whose gates are all 1 for certain.
        """
        if self.bank.seen is not None:
            self.bank.seen.update((module, name) for name in names)
        return self.bank.values(module.training), self.bank.groups_at_one(module.training)

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
