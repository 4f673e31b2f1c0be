"""Rules: how the dimensions of an operator's results come from those of its arguments."""

from hardconcrete.structure.operators import (
    attention,
    contraction,
    convolution,
    creation,
    joining,
    movement,
    normalization,
    pointwise,
    reduction,
    sampling,
)
from hardconcrete.structure.operators.registry import RULES, Rule

__all__ = [
    "RULES",
    "Rule",
    "attention",
    "contraction",
    "convolution",
    "creation",
    "joining",
    "movement",
    "normalization",
    "pointwise",
    "reduction",
    "sampling",
]
