"""Batch-norm statistics for the gates that are used at test time."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> None:
    """Estimate the statistics of all batch norms anew, under the readout of the gates.

    In training they were estimated under sampled gates; at test time the readout shifts them. All
    else stays in evaluation mode, so dropout is off and nothing is drawn. Works on plain models.

    Args:
        model: a ``GatedModel`` or any module.
        batches: inputs of the model: tensors; tuples or lists, of which the first entry is the
            input; or mappings of keyword inputs.

    Example:
        >>> import torch, hardconcrete as hc
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> gated = hc.attach_gates(model, torch.zeros(2, 4), sites=["0:in"])
        >>> hc.recalibrate(gated, [torch.randn(8, 4) for _ in range(10)])
        >>> model[1].num_batches_tracked
        tensor(10)
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        raise ArgumentError("recalibrate needs at least one batch, and batches is empty")
    with _estimating(model, norms), torch.no_grad(), _under_the_readout(model):
        for batch in chain([first], rest):
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch[0] if isinstance(batch, tuple | list) else batch)


def _under_the_readout(model: nn.Module) -> AbstractContextManager[None]:
    """For gated norms too, which are in training mode while they are estimated."""
    if not isinstance(model, GatedModel):
        return nullcontext()
    return model.gates.holding(None, model.gates.readout())


@contextmanager
def _estimating(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Everything in evaluation mode but the norms, which average all batches alike."""
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.training = True
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in momenta.items():
            norm.momentum = momentum
