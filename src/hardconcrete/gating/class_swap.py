"""Multiplying parameters by gates, in place: a module's class is swapped for a gated subclass.

Reading a gated parameter of such a module gives it times its gates; its own forward, its
state_dict and its parameters do not change.
"""

from functools import cache
from typing import Any

import torch
from torch import nn

from hardconcrete.errors import GateError
from hardconcrete.gating.activation_gates import Forward, activation_forward, with_activation_gates
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.module_gates import KEY, ModuleGates


def swap(module: nn.Module, gates: ModuleGates) -> None:
    """Put gates on a module."""
    kind: Any = type(module)
    gates = with_activation_gates(module, gates)
    module.__class__ = _gated_class(kind, _names(gates), activation_forward(module))
    module.__dict__[KEY] = gates


def restore(module: nn.Module) -> None:
    """Take them off: the class and everything else as before."""
    module.__class__ = type(module).ungated  # type: ignore[attr-defined]
    del module.__dict__[KEY]


def is_swapped(module: nn.Module) -> bool:
    """Whether a module has gates."""
    return KEY in module.__dict__


def _names(gates: ModuleGates) -> tuple[str, ...]:
    return tuple(sorted({multiplier.parameter for multiplier in gates.multipliers}))


@cache
def _gated_class(base: Any, names: tuple[str, ...], forward: Forward | None) -> type[nn.Module]:
    """The subclass of ``base`` whose parameters ``names`` are read through their gates."""

    def reader(name: str) -> property:
        return property(lambda self: self.__dict__[KEY].read(self, name))

    members: dict[str, Any] = {name: reader(name) for name in names}
    members |= {"extra_repr": _extra_repr, "register_parameter": _register_parameter}
    members |= {"__delattr__": _refuse_removal}
    members |= {"ungated": base, "__reduce_ex__": _reduce, "__module__": base.__module__}
    if forward is not None:
        members["forward"] = forward
    return type(f"Gated{base.__name__}", (base,), members)


def _extra_repr(module: Any) -> str:
    """As ungated: some layers look at their bias to describe themselves."""
    bank: GateBank = module.__dict__[KEY].bank
    with torch.no_grad():
        z = bank.readout()
        with bank.holding(z, z):
            return type(module).ungated.extra_repr(module)  # type: ignore[no-any-return]


def _register_parameter(module: Any, name: str, param: Any) -> None:
    """Without the check by torch, which reads the attribute."""
    if name in module._parameters:
        module._parameters[name] = param
    else:
        type(module).ungated.register_parameter(module, name, param)


def _refuse_removal(module: Any, name: str) -> None:
    """A parametrization takes a parameter away, and would start from its product with the gates."""
    if any(multiplier.parameter == name for multiplier in module.__dict__[KEY].multipliers):
        raise GateError(
            f"{name} has gates, so it cannot be removed or parametrized; take them off first "
            "(hc.remove_gates), and attach them to what was parametrized"
        )
    type(module).ungated.__delattr__(module, name)


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001
    """Copies and pickles name the ungated class; the gated one is made anew where they arrive.

    So is an ungated one that was made itself, and can be found in no module.
    """
    kind: Any = type(module)
    forward = kind.__dict__.get("forward")
    ungated = kind.ungated.__dict__.get("made_by", kind.ungated)
    how = (ungated, _names(module.__dict__[KEY]), forward)
    return _revive, how, module.__getstate__()


def _revive(base: Any, names: tuple[str, ...], forward: Forward | None) -> nn.Module:
    if isinstance(base, tuple):
        maker, *how = base
        base = maker(*how)
    kind = _gated_class(base, names, forward)
    return kind.__new__(kind)
