"""Rules: how labels pass from the arguments of an operator to its results."""

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
