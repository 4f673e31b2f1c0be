"""Several processes that train one network, as ``torchrun`` starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist


@contextmanager
def processes(device: str = "auto") -> Iterator[str]:
    """Join the others under ``torchrun``; the device of this process.

    Example:
        >>> with processes("cpu") as device:
        ...     device
        'cpu'
    """
    if "RANK" not in os.environ or not dist.is_available():
        yield device
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    own = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield own
    finally:
        dist.destroy_process_group()
