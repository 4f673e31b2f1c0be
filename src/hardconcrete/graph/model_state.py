"""Running somebody's model so that it is afterwards as it was."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All modules in one mode, then each in its own again.

    Flags are set one by one: some models do more than that in ``train`` and ``eval``.
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
    """What the model counts and remembers is afterwards what it was."""
    homes = [module._buffers for module in model.modules() if isinstance(module._buffers, dict)]
    buffers = [(home, dict(home)) for home in homes]
    filled = [buffer for buffer in model.buffers() if not buffer.is_meta]
    contents = [(buffer, buffer.detach().clone()) for buffer in filled]
    try:
        yield
    finally:
        for home, before in buffers:
            home.update(before)
        for buffer, value in contents:
            sparse = buffer.layout is not torch.strided  # which torch cannot compare
            if sparse or not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Without the kernels that take a whole encoder layer in one."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whoever draws next sees the random state as it was."""
    initialized = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if initialized else []):
        yield


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model; what it keeps of its last call is cut from its graph."""
    kept = [value for module in model.modules() for value in vars(module).values()]
    graph = [value for value in kept if isinstance(value, torch.Tensor) and not value.is_leaf]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in graph})
