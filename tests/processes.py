"""New processes, which share nothing with the one that starts them but their arguments."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

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


def join_group(rank: int, folder: Path, world_size: int = 2) -> None:
    """Make this one of the processes that train together."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


def leave_group(answer: Any, rank: int, folder: Path, world_size: int = 2) -> NoReturn:
    """Save the answer of this process, wait for the others, and end it.

    Nothing is torn down: a process group that is freed can wait for ever for a thread of its own,
    and a process that leaves early takes the connections of the others with it.
    """
    torch.save(answer, folder / f"rank{rank}.pt")
    (folder / f"done{rank}").touch()
    until = time.monotonic() + 60
    while len([*folder.glob("done*")]) < world_size and time.monotonic() < until:
        time.sleep(0.01)
    os._exit(0)
