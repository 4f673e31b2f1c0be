"""Penalties and budgets to add to the loss of a task, and checks of them."""

from hardconcrete.objective.base import Penalties, Penalty
from hardconcrete.objective.budget import Budget
from hardconcrete.objective.diagnostics import check_gates, check_run
from hardconcrete.objective.distillation import distillation_loss
from hardconcrete.objective.importance_budget import (
    DESCENT_END,
    DESCENT_START,
    ImportanceBudget,
)
from hardconcrete.objective.lam_conventions import lam_per_weight
from hardconcrete.objective.learned_budget import LearnedBudget
from hardconcrete.objective.method_penalty import MethodPenalty
from hardconcrete.objective.penalty import L0Penalty
from hardconcrete.objective.recalibrate import recalibrate

__all__ = [
    "DESCENT_END",
    "DESCENT_START",
    "Budget",
    "ImportanceBudget",
    "L0Penalty",
    "LearnedBudget",
    "MethodPenalty",
    "Penalties",
    "Penalty",
    "check_gates",
    "check_run",
    "distillation_loss",
    "lam_per_weight",
    "recalibrate",
]
