"""The clock: calls made in turn, so that what slows a machine down slows all of them."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from time import perf_counter

import torch

Call = Callable[[], object]

WARMUP = 5
"""Calls of each kind before the clock runs."""


def interleaved(
    calls: Sequence[Call],
    repeats: int,
    wait: Callable[[], object] = lambda: None,
    *,
    undisturbed: bool = False,
) -> list[list[float]]:
    """Milliseconds of the calls, made in turn, and in the opposite order every other round.

    Args:
        calls: what is timed.
        repeats: timed calls of each.
        wait: called before the clock is read.
        undisturbed: leave out calls in which another process took the processor; where fewer than
            a third are left, the fastest third of all instead.

    Example:
        >>> [len(times) for times in interleaved([lambda: 1, lambda: 2], repeats=3)]
        [3, 3]
    """
    for call in chain.from_iterable([calls] * WARMUP):
        call()
    times: list[list[float]] = [[] for _ in calls]
    calm: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats):
        for index in range(len(calls))[:: -1 if repeat % 2 else 1]:
            wait()  # for what the device still has to do
            lost = preemptions() if undisturbed else 0
            start = perf_counter()
            calls[index]()
            wait()
            times[index].append(1000 * (perf_counter() - start))
            if undisturbed and preemptions() == lost:
                calm[index].append(times[index][-1])
    if not undisturbed:
        return times
    least = math.ceil(repeats / 3)
    return [
        own if len(own) >= least else sorted(every)[:least]
        for own, every in zip(calm, times, strict=True)
    ]


def preemptions() -> int:
    """How often this process had to give up a processor so far; 0 where nobody counts.

    Example:
        >>> preemptions() >= 0
        True
    """
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile, the median first: the least is the fastest.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (3.0, 2.0, 4.0)
    """
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return median, first, third


def wait_for(devices: Iterable[torch.device]) -> None:
    """Let every device finish what it was told to do."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
