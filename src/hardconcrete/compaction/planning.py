"""From gates to a plan: look at a model without its gates, bury the dead, note what stays."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction.death import Graveyard
from hardconcrete.compaction.plan import CompactionPlan, Cut, Kept, Scale, classes_of
from hardconcrete.gating import GatedModel
from hardconcrete.gating.folding import masks
from hardconcrete.structure.axes import Value
from hardconcrete.structure.groups import describe
from hardconcrete.structure.relations import selecting_layers
from hardconcrete.structure.walk import Walk, first_names, module_path, operator_name

NORMS = ("batch_norm", "instance_norm")


def make_plan(
    gated: GatedModel,
    plain: nn.Module,
    *,
    min_units: int = 1,
    values: Tensor | None = None,
) -> CompactionPlan:
    """What the readout of the gates, or other values of them, leave of a model.

    Args:
        gated: the model with its gates.
        plain: without them.
        min_units: how many units each group keeps at least.
        values: of the gates, in place of their readout.
    """
    args, kwargs = gated.example
    found = gated.look_at(plain)
    gates = (gated.gates.readout() if values is None else values).detach().cpu()
    z = masks(gated, plain, gates)
    yard = Graveyard(found, {name: mask.cpu() != 0 for name, mask in z.items()})
    yard.bury()
    reads = {
        name: yard.open_along(name, 1) & yard.keeps((name, 1))
        for name in yard.alive
        if (name, 1) in yard.roots
    }
    structure = describe(found, plain, 1)
    chance = masks(gated, plain, gated.gates.distribution().open_probability.detach().cpu())
    yard.revive(structure, min_units, chance)
    selections, closed = _selections(yard, plain, reads)
    groups = {}
    for group in structure:
        roots = yard.relations.units_of(group)
        kept = tuple(k for k, root in enumerate(roots) if root not in yard.dead)
        groups[group.name] = Kept(group.units, kept)
    return CompactionPlan(
        model=type(plain).__name__,
        groups=groups,
        cuts=_cuts(yard, closed),
        scales=_scales(gated, plain, gates),
        selections=selections,
        attributes=_channels(yard, found, plain),
        inputs=_described([list(args), dict(kwargs)]),
        modules=classes_of(plain),
    )


def _described(part: Any) -> Any:
    """Shapes and types of example inputs, in words that JSON has."""
    if isinstance(part, Tensor):
        return {"shape": list(part.shape), "dtype": str(part.dtype).removeprefix("torch.")}
    if isinstance(part, Mapping):
        return {str(name): _described(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_described(value) for value in part]
    if isinstance(part, tuple):
        return {"tuple": [_described(value) for value in part]}
    return part if isinstance(part, int | float | str | bool | None) else repr(part)


def _cuts(yard: Graveyard, closed: dict[tuple[str, int], Tensor]) -> tuple[Cut, ...]:
    cuts = []
    for name, dim in yard.roots:
        keeps = yard.keeps((name, dim))
        keeps = keeps & ~closed.get((name, dim), torch.zeros_like(keeps))
        if not keeps.all():
            cuts.append(Cut(name, dim, len(keeps), tuple(keeps.nonzero().flatten().tolist())))
    return tuple(cuts)


def _scales(gated: GatedModel, plain: nn.Module, gates: Tensor) -> tuple[Scale, ...]:
    """The gates along every axis that they multiply."""
    names = first_names(plain)
    found: dict[tuple[str, int | None, int], Scale] = {}
    for group in gated.groups:
        own = gates[group.slice]
        for axis in group.axes:
            name = names[axis.parameter]
            values = axis.gates(own)
            if not (values == 1).all():
                key = name, axis.dim, group.index
                found[key] = Scale(name, axis.dim, tuple(values.tolist()))
    return tuple(found.values())


def _selections(
    yard: Graveyard, plain: nn.Module, reads: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[int, ...]], dict[tuple[str, int], Tensor]]:
    """Layers with shut inputs whose units live on: they select what they read.

    One that reads nothing at all, or had nothing left, has nothing to select.
    """
    selections, closed = {}, {}
    revived = torch.tensor(sorted(yard.revived), dtype=torch.int64)
    for name, path in selecting_layers(plain, yard.relations).items():
        if name not in reads or not reads[name].any():
            continue
        arriving = yard.keeps((name, 1))
        shut = arriving & ~reads[name]
        shut &= ~torch.isin(yard.roots[name, 1], revived)  # these were asked for
        if (arriving & ~shut).any() and shut.any():
            closed[name, 1] = shut
            selections[path] = tuple((~shut[arriving]).nonzero().flatten().tolist())
    return selections, closed


def _channels(yard: Graveyard, found: Walk, plain: nn.Module) -> dict[str, int]:
    """Sizes of norms that have no tensors."""
    sizes = {}
    for node, value in found.values.items():
        if node.op != "call_function" or operator_name(node.target) not in NORMS:
            continue
        path = module_path(node)
        module: Any = plain.get_submodule(path)
        bare = not list(module.parameters()) and not list(module.buffers())
        if bare and hasattr(module, "num_features"):
            sizes[f"{path}.num_features"] = left_along(yard, value, 1)
    return sizes


def left_along(yard: Graveyard, value: Value, dim: int) -> int:
    """Size of a dimension after the cuts."""
    return int(stays(yard, value, dim).sum())


def stays(yard: Graveyard, value: Value, dim: int) -> Tensor:
    """Which indices of a dimension of a tensor stay."""
    parts = value.along(dim)
    if not parts:
        return torch.ones(value.shape[dim], dtype=torch.bool)
    dead = torch.tensor(sorted(yard.dead), dtype=torch.int64)
    roots = yard.walk.scope.labels.find(parts[0].labels)
    for other in range(len(value.shape)):
        if other != dim:
            roots = roots.narrow(other, 0, 1)
    return ~torch.isin(roots.reshape(-1), dead)
