"""Named sites whose closed gates made nothing smaller."""

import warnings

from torch import Tensor

from hardconcrete.compaction.plan import CompactionPlan
from hardconcrete.errors import HardConcreteWarning
from hardconcrete.gating import GatedModel
from hardconcrete.gating.groups import SITE_KIND
from hardconcrete.graph.propagate import first_names
from hardconcrete.units import Analysis, Axis, Group


def warn_of_idle_sites(
    gated: GatedModel, values: Tensor, plan: CompactionPlan, analysis: Analysis, *, stacklevel: int
) -> None:
    """Warn of named sites with closed gates none of which removed anything.

    Gates on single weights are no part of this: they are not meant to change sizes.
    """
    names = first_names(gated.model)
    removed = {(cut.tensor, cut.dim): set(range(cut.size)) - set(cut.kept) for cut in plan.cuts}
    for group in gated.groups:
        if group.kind != SITE_KIND:
            continue
        closed = set((values[group.slice] == 0).nonzero().flatten().tolist())
        axes = [axis for axis in group.axes if axis.dim is not None]
        is_idle = not any(closed & removed.get((names[a.tensor], a.dim), set()) for a in axes)  # type: ignore[arg-type]
        if closed and axes and is_idle:
            warnings.warn(
                f"{group.name}: {len(closed)} of {group.units} gates are closed, and the model is "
                f"not smaller for it: {_why(group, closed, names, analysis)}",
                HardConcreteWarning,
                stacklevel=stacklevel,
            )


def _why(group: Group, closed: set[int], names: dict[str, str], analysis: Analysis) -> str:
    """What the closed units belong to, from the first one of them."""
    if len(closed) == group.units:
        return "a layer whose gates are all closed keeps its size"
    axis: Axis = group.axes[0]
    roots = analysis.relations.roots.get((names[axis.tensor], axis.dim))  # type: ignore[arg-type]
    root = None if roots is None else int(roots[min(closed)])
    reason = analysis.labelled.state.labels.why_fixed().get(root) if root is not None else None
    if reason is not None:
        return f"these units stay, because of this: {reason}"
    whole = [name for name, units in analysis.units_by_root.items() if root in units]
    if not whole:
        return "these units stay, because nothing that can be cut belongs to them alone"
    return (
        f"the units of {whole[0]} stay, because other weights make them too, or zeros become other "
        f"values before they are read. Gate what reads them: sites='auto', include={whole[0]!r}"
    )
