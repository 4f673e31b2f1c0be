"""Several processes that train one network, as ``torchrun`` starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist


@contextmanager
def processes(device: str = "auto") -> Iterator[str]:
    """Join the other processes under ``torchrun``, and yield the device of this one.

    Example:
        >>> with processes("cpu") as device:
        ...     device
        'cpu'
    """
    if "RANK" not in os.environ or not dist.is_available():
        yield device
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    process_device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(process_device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    yield process_device
    # Not after an error: NCCL would wait for the captured steps that its traceback still holds.
    dist.destroy_process_group()


def rank() -> int:
    """The number of this process among those that train one network."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """How many processes train one network."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agreed(number: float) -> float:
    """The number of the first process, in all processes: their clocks differ.

    Example:
        >>> agreed(0.5)
        0.5
    """
    if world() == 1:
        return number
    on_gpu = dist.get_backend() == "nccl"
    shared = torch.tensor(number, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    dist.broadcast(shared, 0)
    return shared.item()
