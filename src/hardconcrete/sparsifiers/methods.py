"""Methods by name: families of gates with the settings of their papers."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from hardconcrete.errors import ArgumentError
from hardconcrete.sparsifiers.base import Sparsifier
from hardconcrete.sparsifiers.bayesian_compression import GroupNormalJeffreys
from hardconcrete.sparsifiers.bernoulli import GeneralizedDropout, StraightThrough
from hardconcrete.sparsifiers.concrete import Concrete
from hardconcrete.sparsifiers.hard_concrete import RectifiedGates
from hardconcrete.sparsifiers.horseshoe import GroupHorseshoe
from hardconcrete.sparsifiers.lasso import L1, GroupLasso
from hardconcrete.sparsifiers.magnitude import Magnitude
from hardconcrete.sparsifiers.rectified_noise import RectifiedGaussian, RectifiedLogistic
from hardconcrete.sparsifiers.sbp import SBP
from hardconcrete.sparsifiers.sparse_vd import SparseVD

METHODS: Mapping[str, Callable[[], Sparsifier]] = {
    "hard-concrete": RectifiedGates,
    "sbp": SBP,
    "gnj": GroupNormalJeffreys,
    "ghs": GroupHorseshoe,
    "sparse-vd": SparseVD,
    "group-lasso": GroupLasso,
    "generalized-dropout": GeneralizedDropout,
    "straight-through": StraightThrough,
    "concrete": Concrete,
    "rectified-gaussian": RectifiedGaussian,
    "rectified-logistic": RectifiedLogistic,
    "magnitude": Magnitude,
    "l1": L1,
}
"""What ``attach_gates(method=...)`` knows by name."""


def method_of(method: str | Sparsifier) -> Sparsifier:
    """The family that ``method=`` names.

    Example:
        >>> type(method_of("hard-concrete")).__name__
        'RectifiedGates'
    """
    if isinstance(method, Sparsifier):
        return method
    if isinstance(method, str):
        if method in METHODS:
            return METHODS[method]()
        near = get_close_matches(method, METHODS, n=1) or [*METHODS]
        raise ArgumentError(f"method={method!r} is not known; use {' or '.join(map(repr, near))}")
    if isinstance(method, type) and issubclass(method, Sparsifier):
        raise ArgumentError(
            f"method takes a {method.__name__}, made with its settings, not its class"
        )
    raise ArgumentError(
        "method takes a name, or a Sparsifier such as RectifiedGates(lambda a: HardConcrete(a, "
        f"0.5)), not a {type(method).__name__}"
    )
