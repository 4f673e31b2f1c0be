"""Context managers that run a model and restore its state afterwards."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set all modules to one mode, then restore the mode of each.

    Flags are set one by one, because some models override ``train`` and ``eval``.
    """
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = training
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards: both the tensors and their contents."""
    holders = [module._buffers for module in model.modules() if isinstance(module._buffers, dict)]
    buffers = [(holder, dict(holder)) for holder in holders]
    with_data = [buffer for buffer in model.buffers() if not buffer.is_meta]
    contents = [(buffer, buffer.detach().clone()) for buffer in with_data]
    try:
        yield
    finally:
        for holder, before in buffers:
            holder.update(before)
        for buffer, value in contents:
            sparse = buffer.layout is not torch.strided  # torch.equal does not take sparse tensors
            if sparse or not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Disable the fused kernels that run a whole transformer encoder layer."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Let a model return no cache of earlier inputs, where a configuration has ``use_cache``.

    The tensors of a cache would count as outputs, which keep their sizes.
    """
    configs = {id(c): c for module in model.modules() if (c := vars(module).get("config"))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state afterwards."""
    initialized = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if initialized else []):
        yield


def detached_copy(model: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """Copy a model. Results of its last call that it stores are detached: deepcopy refuses them.

    Args:
        model: any module.
        shared: its parameters that the copy has, too, and does not change.
    """
    attributes = [value for module in model.modules() for value in vars(module).values()]
    results = [
        value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    memo = {id(value): value.detach().clone() for value in results}
    return copy.deepcopy(model, memo | {id(value): value for value in shared})


def nan_tensors(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers with NaN in them.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = layer.bias.data.fill_(float("nan"))
        >>> nan_tensors(layer)
        ['bias']
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex())
        and not tensor.is_meta
        and tensor.layout is torch.strided
    }
    with torch.no_grad():
        found = [tensor.detach().isnan().any() for tensor in tensors.values()]
    return [name for name, is_nan in zip(tensors, found, strict=True) if is_nan]
