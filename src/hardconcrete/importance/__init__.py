"""Measure how much units matter, select the units to keep, and re-fit the remaining weights.

``hc.importance`` is this package, and can be called:

    >>> import torch, hardconcrete as hc
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    >>> x = torch.randn(64, 4)
    >>> result = hc.importance(model, x.split(16), lambda model, x: model(x).square().mean())
    >>> result["0"].shape
    torch.Size([3])
"""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn

from hardconcrete.importance.batches import Loss
from hardconcrete.importance.refit import refit
from hardconcrete.importance.score import DEFAULT_EXAMPLES, Importance, importance

__all__ = ["Importance", "importance", "refit"]


class _CallableModule(ModuleType):
    """A package that can be called.

    Importing this package sets ``hardconcrete.importance`` to it, so the public function of that
    name must be the package itself.
    """

    def __call__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        examples: int = DEFAULT_EXAMPLES,
    ) -> Importance:
        """See ``hardconcrete.importance.importance``."""
        return importance(model, batches, loss, examples=examples)


sys.modules[__name__].__class__ = _CallableModule
