"""Families of gates: how a gate is parametrized, drawn and read out."""

from hardconcrete.sparsifiers.base import GateParameters, Sparsifier
from hardconcrete.sparsifiers.hard_concrete import RectifiedGates
from hardconcrete.sparsifiers.methods import METHODS, method_of

__all__ = ["METHODS", "GateParameters", "RectifiedGates", "Sparsifier", "method_of"]
