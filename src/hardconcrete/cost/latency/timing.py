"""Time calls in turn, so that a slow phase of the machine affects all of them."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from time import perf_counter

import torch

Call = Callable[[], object]

WARMUP_CALLS = 5
"""Untimed calls of each function before the timed ones."""


def interleaved(
    calls: Sequence[Call],
    repeats: int,
    wait: Callable[[], object] = lambda: None,
    seconds: float = 0.0,
) -> list[list[float]]:
    """Time each function in turn, in reverse order every other round; return milliseconds.

    Args:
        calls: the functions to time.
        repeats: the least number of timed calls of each.
        wait: called before the clock is read, to wait for the device.
        seconds: continue with more calls until this time has passed.

    Example:
        >>> [len(times) for times in interleaved([lambda: 1, lambda: 2], repeats=3)]
        [3, 3]
    """
    for call in chain.from_iterable([calls] * WARMUP_CALLS):
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = perf_counter() + seconds
    for repeat in count():
        if repeat >= repeats and perf_counter() >= end:
            break
        for index in range(len(calls))[:: -1 if repeat % 2 else 1]:
            wait()
            start = perf_counter()
            calls[index]()
            wait()
            times[index].append(1000 * (perf_counter() - start))
    return times


def first_quintile(times: Sequence[float]) -> float:
    """The first quintile. Unlike the mean it is hardly affected by other processes.

    Example:
        >>> first_quintile([1.1, 9.0, 1.0, 1.2, 2.5, 1.3])
        1.1
    """
    return sorted(times)[(len(times) - 1) // 5]


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile, in this order, so that ``min`` compares medians.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (3.0, 2.0, 4.0)
    """
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return median, first, third


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until every device has finished its work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
