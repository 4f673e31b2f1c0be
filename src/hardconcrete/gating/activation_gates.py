"""Gates that multiply an activation of a plain layer instead of its parameters.

The result is the same. Layers choose the activation where it is the smaller tensor, and where every
example has its own gates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.errors import GateError
from hardconcrete.gating.gated_linear import gated_linear
from hardconcrete.gating.holding import Values
from hardconcrete.gating.module_gates import KEY, ModuleGates, Multiplier
from hardconcrete.gating.weight_noise import output_noise

LayerForward = Callable[[Any, Tensor], Tensor]

CONVOLUTIONS = [(kind.forward, kind._conv_forward) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
"""Functions of torch's layers. A subclass with another function may use its weights differently."""


def activation_forward(module: nn.Module) -> LayerForward | None:
    """The gated forward of a dense or convolutional layer.

    None for other layers, and where a parametrization or a hook computes the weights: there the
    parameters are multiplied.
    """
    kind: Any = type(module)
    selects = hasattr(kind, "base") and "kept_inputs" in module._buffers
    if selects:  # among its inputs, since ``shrink`` removed the weights of others
        kind = kind.base
    if not {"weight", "bias"} <= module._parameters.keys():
        return None
    if kind.forward is nn.Linear.forward:
        return _selecting_linear if selects else _linear
    if (kind.forward, getattr(kind, "_conv_forward", None)) in CONVOLUTIONS:
        return _selecting_conv if selects else _conv
    return None


def with_activation_gates(module: nn.Module, gates: ModuleGates) -> ModuleGates:
    """The gates with a note of which ones can multiply an activation of this module."""
    if activation_forward(module) is None:
        return gates
    inner = next((each for each in gates.multipliers if _on_inputs(module, each)), None)
    return replace(gates, inner=inner, outer=_on_outputs(module, gates.multipliers))


def _on_inputs(module: Any, multiplier: Multiplier) -> bool:
    """Whether the gates multiply the inputs, one gate for each."""
    ungrouped = getattr(module, "groups", 1) == 1
    return ungrouped and multiplier.parameter == "weight" and multiplier.dim == 1


def _on_outputs(module: nn.Module, multipliers: Sequence[Multiplier]) -> tuple[Multiplier, ...]:
    """The multipliers of the outputs, if they gate all parameters alike along them."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    outputs = tuple(each for each in multipliers if each.dim == 0)
    alike = {(each.groups, each.index) for each in outputs}
    complete = sorted(each.parameter for each in outputs) == sorted(names)
    return outputs if complete and len(alike) == 1 else ()


def _linear(module: Any, input: Tensor) -> Tensor:  # noqa: A002  (the name torch's layers use)
    place = _place(module, input)
    inner, bank = place.inner, getattr(module, KEY).bank
    if inner is not None and inner.dim() == 1 and bank.flat:
        return _scaled(gated_linear(input, inner, place.weight, place.bias), place.outer, 0)
    return _output(module, input, place, F.linear, 0)


def _conv(module: Any, input: Tensor) -> Tensor:  # noqa: A002
    trailing = len(module.kernel_size)
    return _output(module, input, _place(module, input), module._conv_forward, trailing)


def _output(
    module: Any, x: Tensor, place: "_Place", layer: Callable[..., Tensor], trailing: int
) -> Tensor:
    """The output of a layer, with the noise of its weights, times the gates of the output."""
    x = _scaled(x, place.inner, trailing)
    output = layer(x, place.weight, place.bias)
    variances = [_variance(module, place, name) for name in ("weight", "bias")]
    if variances[0] is not None:
        output = output + output_noise(x, variances[0], variances[1], layer)
    return _scaled(output, place.outer, trailing)


def _selecting_linear(module: Any, input: Tensor) -> Tensor:  # noqa: A002
    return _linear(module, input.index_select(-1, module.kept_inputs))


def _selecting_conv(module: Any, input: Tensor) -> Tensor:  # noqa: A002
    return _conv(module, input.index_select(-1 - len(module.kernel_size), module.kept_inputs))


class _Place(NamedTuple):
    """What is multiplied by gates in a call of a layer.

    ``on_weights`` multiply the parameters; the gates of ``inner`` and ``outer`` do not.
    """

    inner: Tensor | None
    weight: Tensor
    bias: Tensor | None
    outer: Tensor | None
    on_weights: tuple[Multiplier, ...]
    values: Values


def _place(module: Any, x: Tensor) -> _Place:
    """Gates of the input, weight and bias times their gates, gates of the output."""
    gates: ModuleGates = getattr(module, KEY)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if module.training and gates.bank.can_be_left_out(gates.groups):
        return _Place(None, weight, bias, None, (), ())
    values, at_one = gates.values(module, "weight", "bias")
    on_activations = values[0].dim() > 1 or x.numel() < weight.numel()
    inner = gates.inner if on_activations else None
    outer = gates.outer if on_activations else ()  # they multiply the bias with the output
    rest = tuple(each for each in gates.multipliers if each is not inner and each not in outer)
    for multiplier in rest:
        if multiplier.parameter == "weight":
            weight = multiplier.times(weight, gates.bank, values, at_one)
        else:
            bias = multiplier.times(bias, gates.bank, values, at_one)
    inner, last = (
        None if each is None or each.is_one(values, at_one) else each
        for each in (inner, outer[0] if outer else None)
    )
    return _Place(
        inner.gates(gates.bank, values) if inner else None,
        weight,
        bias,
        last.gates(gates.bank, values) if last else None,
        rest,
        values,
    )


def _variance(module: Any, place: _Place, name: str) -> Tensor | None:
    """The variance of a parameter times its gates, where it has noise now."""
    gates: ModuleGates = getattr(module, KEY)
    noise = gates.noise(module, name)
    if noise is None:
        return None
    variance = noise.exp()
    for multiplier in place.on_weights:
        if multiplier.parameter == name:
            once = multiplier.times(variance, gates.bank, place.values, frozenset())
            variance = multiplier.times(once, gates.bank, place.values, frozenset())
    return variance


def _scaled(activation: Tensor, z: Tensor | None, trailing: int) -> Tensor:
    """An activation times the gates of its channels, which lie before ``trailing`` dimensions."""
    if z is None:
        return activation
    batched = activation.dim() - trailing > 1
    if z.dim() > 1 and (not batched or len(z) != len(activation)):
        raise GateError(
            f"a gate per example was drawn for {len(z)} examples, and an activation has "
            f"{len(activation)}: its dimension 0 must be the batch; or use sample='batch'"
        )
    between = activation.dim() - trailing - z.dim()
    shape = (*z.shape[:-1], *[1] * between, z.shape[-1], *[1] * trailing)
    return activation * z.reshape(shape).to(activation.dtype)
