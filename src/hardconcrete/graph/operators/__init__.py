"""Rules: how the dimensions of an operator's results come from those of its arguments."""

from hardconcrete.graph.operators import (
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
from hardconcrete.graph.operators.registry import RULES, Rule

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
