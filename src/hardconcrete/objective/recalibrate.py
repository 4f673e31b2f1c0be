"""Batch-norm statistics for the gate values of evaluation."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardconcrete.errors import ArgumentError
from hardconcrete.gating.bank import GateBank
from hardconcrete.gating.class_swap import is_swapped
from hardconcrete.gating.module_gates import KEY
from hardconcrete.graph.model_state import in_mode


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> None:
    """Estimate the statistics of all batch norms again, with the readout of the gates.

    Training estimates them with sampled gates, and the readout of evaluation shifts them. All other
    modules are in evaluation mode, so there is no dropout and no sampling. Plain models work, too.

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
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"recalibrate takes a module, not a {type(model).__name__}")
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches is a {type(batches).__name__}; it takes an iterable of batches, such as a "
            "DataLoader"
        )
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        raise ArgumentError("recalibrate needs at least one batch, and batches is empty")
    with _estimating(model, norms), torch.no_grad(), ExitStack() as held:
        for bank in _banks(model):  # gated norms are in training mode and would draw
            held.enter_context(bank.holding(None, bank.readout()))
        for batch in chain([first], rest):
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
        _refuse_not_finite(model, norms)


def _banks(model: nn.Module) -> list[GateBank]:
    """The banks of all gated modules inside a model, also if it wraps a ``GatedModel``."""
    gated = [module for module in model.modules() if is_swapped(module)]
    return list(dict.fromkeys(module.__dict__[KEY].bank for module in gated))


def _refuse_not_finite(model: nn.Module, norms: list[_BatchNorm]) -> None:
    """Refuse statistics of batches with NaN, or of layers that make NaN of them."""
    names = {module: name for name, module in model.named_modules()}
    for norm in norms:
        statistics: Any = norm.running_mean, norm.running_var
        if not all(bool(values.isfinite().all()) for values in statistics):
            raise ArgumentError(
                f"the statistics of {names[norm]} would not be finite, and stay as they were: "
                "check the batches and the weights for NaN"
            )


@contextmanager
def _estimating(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Put all modules but the norms in evaluation mode; the norms average all batches equally.

    After an exception the statistics are as before.
    """
    momenta = {norm: norm.momentum for norm in norms}
    buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        with in_mode(model, training=False):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None
                norm.training = True
            yield
    except BaseException:
        for buffer, values in zip(buffers, before, strict=True):
            buffer.copy_(values)
        raise
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
