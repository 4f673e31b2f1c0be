"""What is minimised besides the task's own loss, and what belongs to minimising it."""

from hardconcrete.objective.budget import Budget
from hardconcrete.objective.penalty import L0Penalty
from hardconcrete.objective.recalibrate import recalibrate

__all__ = ["Budget", "L0Penalty", "recalibrate"]
