"""Processes that are new to the library, and have nothing of another but what they are given."""

from collections.abc import Callable
from typing import Any

from torch import multiprocessing


def in_processes(count: int, function: Callable[..., None], *args: Any) -> None:
    """Run it in so many, which get their number first; what one raises is raised here.

    They begin where torch has been imported, once for all of them, and nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo"])  # which optimisers import
    multiprocessing.start_processes(function, args, count, start_method="forkserver")
