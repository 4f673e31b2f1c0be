"""New processes, which share nothing with the one that starts them but their arguments."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def in_processes(count: int, function: Callable[..., None], *args: Any) -> None:
    """Run a function in several processes, which get their rank first. Raise what one raises.

    Torch is imported once for all of them, and nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo"])  # which optimisers import
    multiprocessing.start_processes(function, args, count, start_method="forkserver")


def join_pair(rank: int, folder: Path) -> None:
    """Make this one of two processes that train together."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
