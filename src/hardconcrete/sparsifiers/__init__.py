"""Families of gates: how a gate is parametrized, drawn and read out."""

from hardconcrete.sparsifiers.base import GateParameters, Sparsifier
from hardconcrete.sparsifiers.hard_concrete import RectifiedGates, as_sparsifier

__all__ = ["GateParameters", "RectifiedGates", "Sparsifier", "as_sparsifier"]
