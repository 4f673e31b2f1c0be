"""From gates to a plan: find the dead units, and list what each tensor keeps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.compaction.architecture import classes_of
from hardconcrete.compaction.kept_sizes import size_after_cuts
from hardconcrete.compaction.plan import CompactionPlan, Cut, KeptUnits, Scale
from hardconcrete.errors import CompactionError
from hardconcrete.gating import GatedModel
from hardconcrete.gating.folding import gate_masks
from hardconcrete.graph.propagate import first_names, module_path, operator_name
from hardconcrete.units import Analysis
from hardconcrete.units.axis import Place
from hardconcrete.units.liveness import Liveness
from hardconcrete.units.relations import selecting_layers

NORMS = {
    "batch_norm": "num_features",
    "instance_norm": "num_features",
    "group_norm": "num_channels",
}
"""Norms per channel or group, and the attribute of torch's modules that has their channels."""

DIVIDES = ("_weight_norm", "_weight_norm_interface", "group_norm")
"""Operators in which torch divides by the number of entries, and ends the process if it is 0."""


def make_plan(
    gated: GatedModel,
    plain: nn.Module,
    *,
    min_units: int = 1,
    may_empty: bool = False,
    values: Tensor | None = None,
) -> CompactionPlan:
    """The plan that keeps the units which the gates leave alive.

    Args:
        gated: the model with its gates.
        plain: a copy of it without gates.
        min_units: how many units each group keeps at least.
        may_empty: whether the groups that may lose all units keep none of them.
        values: of the gates, in place of their readout.
    """
    args, kwargs = gated.example
    analysis = gated.analyze(plain)
    gates = (gated.gates.readout() if values is None else values).detach().cpu()
    least = {
        name: 0 if may_empty and name in _may_empty(gated) else min_units for name in analysis.names
    }
    liveness, reads = _settled(gated, plain, analysis, gates, least)
    _refuse_empty_norms(liveness)
    selections, unread = _selections(liveness, plain, reads)
    return CompactionPlan(
        model=type(plain).__name__,
        groups=_kept_units(liveness, analysis),
        cuts=_cuts(liveness, unread),
        scales=_scales(gated, plain, gates),
        selections=selections,
        attributes=_norm_sizes(liveness, plain),
        inputs=_described([list(args), dict(kwargs)]),
        modules=classes_of(plain),
    )


def _refuse_empty_norms(liveness: Liveness) -> None:
    """Refuse some norms without entries, in which torch divides by zero."""
    for node, result in liveness.labelled.values.items():
        if node.op != "call_function" or operator_name(node.target) not in DIVIDES:
            continue
        value = result[0] if isinstance(result, list) else result
        if not all(size_after_cuts(liveness, value, dim) for dim in range(len(value.shape))):
            path = module_path(node).partition(".parametrizations")[0]
            raise CompactionError(
                f"{path}: torch cannot normalise a tensor without entries; keep a unit of each "
                "group that it reads or makes (min_units=1)"
            )


def _may_empty(gated: GatedModel) -> set[str]:
    return {group.name for group in gated.groups if group.may_empty}


def _settled(
    gated: GatedModel, plain: nn.Module, analysis: Analysis, gates: Tensor, least: Mapping[str, int]
) -> tuple[Liveness, dict[str, Tensor]]:
    """Which units live, and which living inputs each gated layer reads before units are revived."""
    is_open = {name: mask.cpu() != 0 for name, mask in gate_masks(gated, plain, gates).items()}
    liveness = Liveness(analysis.labelled, analysis.relations, is_open)
    liveness.settle()
    reads = {
        name: liveness.open_along(name, 1) & liveness.keeps((name, 1))
        for name in liveness.is_open
        if (name, 1) in liveness.roots
    }
    chance = gate_masks(gated, plain, gated.gates.ranking().cpu())
    liveness.revive(analysis, least, chance)
    return liveness, reads


def _kept_units(liveness: Liveness, analysis: Analysis) -> dict[str, KeptUnits]:
    """Which units of each group are alive."""
    return {
        name: KeptUnits(
            len(roots), tuple(k for k, root in enumerate(roots) if root not in liveness.dead)
        )
        for name, roots in analysis.units_by_root.items()
    }


def _described(part: Any) -> Any:
    """Shapes and types of example inputs, as JSON can hold them."""
    if isinstance(part, Tensor):
        return {"shape": list(part.shape), "dtype": str(part.dtype).removeprefix("torch.")}
    if isinstance(part, Mapping):
        return {str(name): _described(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_described(value) for value in part]
    if isinstance(part, tuple):
        return {"tuple": [_described(value) for value in part]}
    return part if isinstance(part, int | float | str | bool | None) else repr(part)


def _cuts(liveness: Liveness, unread: dict[Place, Tensor]) -> tuple[Cut, ...]:
    """The indices that every cut axis keeps."""
    cuts = []
    for name, dim in liveness.roots:
        keeps = liveness.keeps((name, dim))
        keeps = keeps & ~unread.get((name, dim), torch.zeros_like(keeps))
        if not keeps.all():
            cuts.append(Cut(name, dim, len(keeps), tuple(keeps.nonzero().flatten().tolist())))
    return tuple(cuts)


def _scales(gated: GatedModel, plain: nn.Module, gates: Tensor) -> tuple[Scale, ...]:
    """The gates along every axis that they multiply."""
    names = first_names(plain)
    scales: dict[tuple[str, int | None, int], Scale] = {}
    for group in gated.groups:
        group_gates = gates[group.slice]
        for axis in group.gated:
            name = names[axis.tensor]
            values = axis.expand(group_gates, fill=1.0).flatten()
            if not (values == 1).all():
                key = name, axis.dim, group.index
                scales[key] = Scale(name, axis.dim, tuple(values.tolist()))
    return tuple(scales.values())


def _selections(
    liveness: Liveness, plain: nn.Module, reads: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[int, ...]], dict[Place, Tensor]]:
    """The inputs that layers select because other inputs are closed, and the inputs left unread.

    Units of closed inputs stay alive if another layer reads them. A layer without any open input
    selects nothing.
    """
    selections, unread = {}, {}
    revived = torch.tensor(sorted(liveness.revived), dtype=torch.int64)
    for name, path in selecting_layers(plain, liveness.relations).items():
        if name not in reads or not reads[name].any():
            continue
        arriving = liveness.keeps((name, 1))
        shut = arriving & ~reads[name] & ~torch.isin(liveness.roots[name, 1], revived)
        if (arriving & ~shut).any() and shut.any():
            unread[name, 1] = shut
            selections[path] = tuple((~shut[arriving]).nonzero().flatten().tolist())
    return selections, unread


def _norm_sizes(liveness: Liveness, plain: nn.Module) -> dict[str, int]:
    """The number of features of norms that have no tensors."""
    sizes = {}
    for node, value in liveness.labelled.values.items():
        if node.op != "call_function" or operator_name(node.target) not in NORMS:
            continue
        path = module_path(node)
        module: Any = plain.get_submodule(path)
        name = NORMS[operator_name(node.target)]
        if not [*module.parameters(), *module.buffers()] and hasattr(module, name):
            before, after = value.shape[1], size_after_cuts(liveness, value, 1)
            sizes[f"{path}.{name}"] = after
            if hasattr(module, "num_groups"):
                sizes[f"{path}.num_groups"] = module.num_groups * after // before
    return sizes
