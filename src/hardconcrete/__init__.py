"""Train any PyTorch network to be small: L0 regularization with hard concrete gates.

The names below are the public ones. They are imported on first use, so that the command line
answers before torch has been loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardconcrete.distributions import HardConcrete, Rectified
    from hardconcrete.errors import HardConcreteError

__version__ = "0.1.0"

__all__ = ["HardConcrete", "HardConcreteError", "Rectified"]

_HOME = {
    "HardConcrete": "distributions",
    "HardConcreteError": "errors",
    "Rectified": "distributions",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hardconcrete' has no attribute {name!r}")
    return getattr(import_module(f"hardconcrete.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
