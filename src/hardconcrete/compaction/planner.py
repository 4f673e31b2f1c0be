"""From gates to a plan: look at a model without its gates, bury the dead, note what stays."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction.plan import CompactionPlan, Cut, Kept, Scale, classes_of
from hardconcrete.gating import GatedModel
from hardconcrete.gating.folding import masks
from hardconcrete.graph.propagate import LabelledGraph, first_names, module_path, operator_name
from hardconcrete.graph.values import Value
from hardconcrete.units.group import describe
from hardconcrete.units.liveness import Liveness
from hardconcrete.units.relations import selecting_layers

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
    liveness = Liveness(found, {name: mask.cpu() != 0 for name, mask in z.items()})
    liveness.settle()
    reads = {
        name: liveness.open_along(name, 1) & liveness.keeps((name, 1))
        for name in liveness.alive
        if (name, 1) in liveness.roots
    }
    structure = describe(found, plain, 1)
    chance = masks(gated, plain, gated.gates.distribution().open_probability.detach().cpu())
    liveness.revive(structure, min_units, chance)
    selections, closed = _selections(liveness, plain, reads)
    groups = {}
    for group in structure:
        roots = liveness.relations.units_of(group)
        kept = tuple(k for k, root in enumerate(roots) if root not in liveness.dead)
        groups[group.name] = Kept(group.units, kept)
    return CompactionPlan(
        model=type(plain).__name__,
        groups=groups,
        cuts=_cuts(liveness, closed),
        scales=_scales(gated, plain, gates),
        selections=selections,
        attributes=_channels(liveness, found, plain),
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


def _cuts(liveness: Liveness, closed: dict[tuple[str, int], Tensor]) -> tuple[Cut, ...]:
    cuts = []
    for name, dim in liveness.roots:
        keeps = liveness.keeps((name, dim))
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
    liveness: Liveness, plain: nn.Module, reads: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[int, ...]], dict[tuple[str, int], Tensor]]:
    """Layers with shut inputs whose units live on: they select what they read.

    One that reads nothing at all, or had nothing left, has nothing to select.
    """
    selections, closed = {}, {}
    revived = torch.tensor(sorted(liveness.revived), dtype=torch.int64)
    for name, path in selecting_layers(plain, liveness.relations).items():
        if name not in reads or not reads[name].any():
            continue
        arriving = liveness.keeps((name, 1))
        shut = arriving & ~reads[name]
        shut &= ~torch.isin(liveness.roots[name, 1], revived)  # these were asked for
        if (arriving & ~shut).any() and shut.any():
            closed[name, 1] = shut
            selections[path] = tuple((~shut[arriving]).nonzero().flatten().tolist())
    return selections, closed


def _channels(liveness: Liveness, found: LabelledGraph, plain: nn.Module) -> dict[str, int]:
    """Sizes of norms that have no tensors."""
    sizes = {}
    for node, value in found.values.items():
        if node.op != "call_function" or operator_name(node.target) not in NORMS:
            continue
        path = module_path(node)
        module: Any = plain.get_submodule(path)
        bare = not list(module.parameters()) and not list(module.buffers())
        if bare and hasattr(module, "num_features"):
            sizes[f"{path}.num_features"] = size_after_cuts(liveness, value, 1)
    return sizes


def size_after_cuts(liveness: Liveness, value: Value, dim: int) -> int:
    """Size of a dimension after the cuts."""
    return int(kept_indices(liveness, value, dim).sum())


def kept_indices(liveness: Liveness, value: Value, dim: int) -> Tensor:
    """Which indices of a dimension of a tensor stay."""
    parts = value.components_along(dim)
    if not parts:
        return torch.ones(value.shape[dim], dtype=torch.bool)
    dead = torch.tensor(sorted(liveness.dead), dtype=torch.int64)
    roots = liveness.walk.state.labels.find(parts[0].labels)
    for other in range(len(value.shape)):
        if other != dim:
            roots = roots.narrow(other, 0, 1)
    return ~torch.isin(roots.reshape(-1), dead)
