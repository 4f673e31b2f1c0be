"""Multiply parameters by gates, in place: the class of a module is swapped for a gated subclass.

Reading a gated parameter of such a module gives the product with its gates. The forward, the
state_dict and the parameters of the module do not change.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from hardconcrete.errors import GateError
from hardconcrete.gating.activation_gates import (
    LayerForward,
    activation_forward,
    with_activation_gates,
)
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.module_gates import KEY, ModuleGates
from hardconcrete.gating.products import recomputes_products
from hardconcrete.graph.model_state import detached_copy


def swap(module: nn.Module, gates: ModuleGates) -> None:
    """Put gates on a module."""
    kind: Any = type(module)
    gates = with_activation_gates(module, gates)
    alone = next(module.children(), None) is None
    module.__class__ = _gated_class(kind, _names(gates), activation_forward(module), alone)
    module.__dict__[KEY] = gates


def restore(module: nn.Module) -> None:
    """Take the gates off: the class and everything else is as before."""
    module.__class__ = type(module).ungated  # type: ignore[attr-defined]
    del module.__dict__[KEY]


def restore_all(model: nn.Module) -> nn.Module:
    """Take the gates off all modules of a model."""
    for module in [module for module in model.modules() if is_swapped(module)]:
        restore(module)
    return model


def plain_copy(gated: Any, *, shared: Iterable[nn.Parameter] = ()) -> nn.Module:
    """A copy of the user's model, without gates. It has the shared parameters, too."""
    copied: Any = detached_copy(gated, shared)
    return restore_all(copied.model)


def is_swapped(module: nn.Module) -> bool:
    """Whether a module has gates."""
    return KEY in module.__dict__


def _names(gates: ModuleGates) -> tuple[str, ...]:
    return tuple(sorted({multiplier.parameter for multiplier in gates.multipliers}))


@cache
def _gated_class(
    base: Any, names: tuple[str, ...], forward: LayerForward | None, alone: bool
) -> type[nn.Module]:
    """The subclass of ``base`` whose parameters ``names`` are read through their gates.

    Args:
        base: the class of the module.
        names: the gated parameters.
        forward: another forward, which can multiply activations.
        alone: whether the module has no children, so that its forward may recompute products.
    """

    def reader(name: str) -> property:
        return property(lambda self: self.__dict__[KEY].read(self, name))

    members: dict[str, Any] = {name: reader(name) for name in names}
    members |= {"extra_repr": _extra_repr, "register_parameter": _register_parameter}
    members |= {"__delattr__": _refuse_removal}
    members |= {"ungated": base, "__reduce_ex__": _reduce, "__module__": base.__module__}
    members["how"] = forward, alone
    if alone:
        members["forward"] = recomputes_products(forward or base.forward)
    elif forward is not None:
        members["forward"] = forward
    return type(f"Gated{base.__name__}", (base,), members)


def _extra_repr(module: Any) -> str:
    """The text of the ungated layer. Some layers read their bias for it."""
    bank: GateBank = module.__dict__[KEY].bank
    with torch.no_grad():
        z = bank.readout()
        with bank.holding(z, z):
            return type(module).ungated.extra_repr(module)  # type: ignore[no-any-return]


def _register_parameter(module: Any, name: str, param: Any) -> None:
    """Skip the check of torch, which reads the attribute."""
    if name in module._parameters:
        module._parameters[name] = param
    else:
        type(module).ungated.register_parameter(module, name, param)


def _refuse_removal(module: Any, name: str) -> None:
    """Refuse parametrizations: they would start from the product of a weight and its gates."""
    if any(multiplier.parameter == name for multiplier in module.__dict__[KEY].multipliers):
        raise GateError(
            f"{name} has gates, so it cannot be removed or parametrized; take them off first "
            "(hc.remove_gates), and attach gates to the parametrized model"
        )
    type(module).ungated.__delattr__(module, name)


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001
    """Pickle the ungated class; the gated class is made again when the copy is read.

    Ungated classes that this library made are made again, too, because no module holds them.
    """
    kind: Any = type(module)
    ungated = kind.ungated.__dict__.get("made_by", kind.ungated)
    how = (ungated, _names(module.__dict__[KEY]), *kind.how)
    return _revive, how, module.__getstate__()


def _revive(
    base: Any, names: tuple[str, ...], forward: LayerForward | None, alone: bool
) -> nn.Module:
    if isinstance(base, tuple):
        maker, *how = base
        base = maker(*how)
    kind = _gated_class(base, names, forward, alone)
    return kind.__new__(kind)
