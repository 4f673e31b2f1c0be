"""Train any PyTorch network to be small: L0 regularization with hard concrete gates.

The names below are the public ones. They are imported on first use, so that the command line
answers before torch has been loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardconcrete.compaction import CompactionPlan, compact, load, save, shrink
    from hardconcrete.cost import Count, LatencyTable, count
    from hardconcrete.distributions import HardConcrete, Rectified
    from hardconcrete.errors import HardConcreteError, HardConcreteWarning
    from hardconcrete.gating import (
        GatedModel,
        Site,
        attach_gates,
        parameter_groups,
        remove_gates,
    )
    from hardconcrete.importance import Importance, importance
    from hardconcrete.objective import (
        Budget,
        L0Penalty,
        MethodPenalty,
        check_gates,
        check_run,
        distillation_loss,
        lam_per_weight,
        recalibrate,
    )
    from hardconcrete.pruning import prune
    from hardconcrete.report.comparison import Report
    from hardconcrete.report.measure import measure
    from hardconcrete.report.pareto import pareto
    from hardconcrete.units import Analysis, Group, find_groups

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "Budget",
    "CompactionPlan",
    "Count",
    "GatedModel",
    "Group",
    "HardConcrete",
    "HardConcreteError",
    "HardConcreteWarning",
    "Importance",
    "L0Penalty",
    "LatencyTable",
    "MethodPenalty",
    "Rectified",
    "Report",
    "Site",
    "attach_gates",
    "check_gates",
    "check_run",
    "compact",
    "count",
    "distillation_loss",
    "find_groups",
    "importance",
    "lam_per_weight",
    "load",
    "measure",
    "parameter_groups",
    "pareto",
    "prune",
    "recalibrate",
    "remove_gates",
    "save",
    "shrink",
]

_HOME = {
    "compaction": ("CompactionPlan", "compact", "load", "save", "shrink"),
    "cost": ("Count", "LatencyTable", "count"),
    "distributions": ("HardConcrete", "Rectified"),
    "errors": ("HardConcreteError", "HardConcreteWarning"),
    "gating": (
        "GatedModel",
        "Site",
        "attach_gates",
        "parameter_groups",
        "remove_gates",
    ),
    "importance": ("Importance",),
    "objective": (
        "Budget",
        "L0Penalty",
        "MethodPenalty",
        "check_gates",
        "check_run",
        "distillation_loss",
        "lam_per_weight",
        "recalibrate",
    ),
    "pruning": ("prune",),
    "report.comparison": ("Report",),
    "report.measure": ("measure",),
    "report.pareto": ("pareto",),
    "units": ("Analysis", "Group", "find_groups"),
}


def __getattr__(name: str) -> object:
    if name == "importance":  # a package that can be called
        return import_module("hardconcrete.importance")
    for folder, names in _HOME.items():
        if name in names:
            if folder == "gating":  # states of shrunk models load into gated ones
                import_module("hardconcrete.compaction")
            return getattr(import_module(f"hardconcrete.{folder}"), name)
    raise AttributeError(f"module 'hardconcrete' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
