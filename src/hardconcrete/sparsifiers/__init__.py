"""Families of gates: how a gate is parametrized, drawn and read out."""

from hardconcrete.sparsifiers.base import GateParameters, Sparsifier
from hardconcrete.sparsifiers.bayesian_compression import GroupNormalJeffreys
from hardconcrete.sparsifiers.bernoulli import GeneralizedDropout, StraightThrough
from hardconcrete.sparsifiers.concrete import Concrete
from hardconcrete.sparsifiers.hard_concrete import RectifiedGates
from hardconcrete.sparsifiers.horseshoe import GroupHorseshoe
from hardconcrete.sparsifiers.lasso import L1, GroupLasso
from hardconcrete.sparsifiers.magnitude import Magnitude
from hardconcrete.sparsifiers.marked import MarkedUnits
from hardconcrete.sparsifiers.methods import METHODS, method_of
from hardconcrete.sparsifiers.rectified_noise import RectifiedGaussian, RectifiedLogistic
from hardconcrete.sparsifiers.sbp import SBP
from hardconcrete.sparsifiers.sparse_vd import SparseVD
from hardconcrete.sparsifiers.unit_weights import UnitWeights

__all__ = [
    "L1",
    "METHODS",
    "SBP",
    "Concrete",
    "GateParameters",
    "GeneralizedDropout",
    "GroupHorseshoe",
    "GroupLasso",
    "GroupNormalJeffreys",
    "Magnitude",
    "MarkedUnits",
    "RectifiedGates",
    "RectifiedGaussian",
    "RectifiedLogistic",
    "SparseVD",
    "Sparsifier",
    "StraightThrough",
    "UnitWeights",
    "method_of",
]
