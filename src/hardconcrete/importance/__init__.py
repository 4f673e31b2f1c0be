"""Which units matter: measuring their importance, choosing what to keep, re-fitting the rest.

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
from hardconcrete.importance.score import EXAMPLES, Importance, importance

__all__ = ["Importance", "importance", "refit"]


class _CallableModule(ModuleType):
    """Importing a package sets its name in the one around it, so both names must mean the same."""

    def __call__(
        self, model: nn.Module, batches: Iterable[Any], loss: Loss, *, examples: int = EXAMPLES
    ) -> Importance:
        """See ``hardconcrete.importance.importance``."""
        return importance(model, batches, loss, examples=examples)


sys.modules[__name__].__class__ = _CallableModule
