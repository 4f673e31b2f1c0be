"""Gates in the shapes of the parameters that they multiply."""

import torch
from torch import Tensor, nn

from hardconcrete.gating.gated_model import GatedModel
from hardconcrete.graph.propagate import first_names
from hardconcrete.units.group import raw_parameter


def gate_masks(gated: GatedModel, plain: nn.Module, gates: Tensor) -> dict[str, Tensor]:
    """The gates of every gated parameter by its first name; several are multiplied.

    A mask has size 1 along dimensions without gates.
    """
    names = first_names(plain)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    masks: dict[str, Tensor] = {}
    done: set[tuple[str, int | None, int]] = set()
    for group in gated.groups:
        values = gates[group.slice]
        for axis in group.gated:
            name = names[axis.tensor]
            if (name, axis.dim, group.index) not in done:
                done.add((name, axis.dim, group.index))
                z = axis.spread(values, parameters[name].dim())
                masks[name] = masks[name] * z if name in masks else z
    return masks


@torch.no_grad()
def fold(gated: GatedModel, model: nn.Module, gates: Tensor) -> None:
    """Multiply gates into the parameters of this model, or of a plain copy, in place."""
    for name, z in gate_masks(gated, model, gates).items():
        parameter = raw_parameter(model, name)
        parameter.mul_(z.to(parameter.dtype))
