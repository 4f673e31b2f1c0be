"""The clock: calls made in turn, so that what slows a machine down slows all of them."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from time import perf_counter

import torch

Call = Callable[[], object]

WARMUP = 5
"""Calls of each kind before the clock runs."""


def interleaved(
    calls: Sequence[Call],
    repeats: int,
    wait: Callable[[], object] = lambda: None,
    seconds: float = 0.0,
) -> list[list[float]]:
    """Milliseconds of the calls, made in turn, and in the opposite order every other round.

    Args:
        calls: what is timed.
        repeats: timed calls of each.
        wait: called before the clock is read.
        seconds: more calls are timed until so much time has passed.

    Example:
        >>> [len(times) for times in interleaved([lambda: 1, lambda: 2], repeats=3)]
        [3, 3]
    """
    for call in chain.from_iterable([calls] * WARMUP):
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = perf_counter() + seconds
    for repeat in count():
        if repeat >= repeats and perf_counter() >= end:
            break
        for index in range(len(calls))[:: -1 if repeat % 2 else 1]:
            wait()  # for what the device still has to do
            start = perf_counter()
            calls[index]()
            wait()
            times[index].append(1000 * (perf_counter() - start))
    return times


def undisturbed(times: Sequence[float]) -> float:
    """What a call takes when left alone: a fifth of them are faster, for others only add time.

    Example:
        >>> undisturbed([1.1, 9.0, 1.0, 1.2, 2.5, 1.3])
        1.1
    """
    return sorted(times)[(len(times) - 1) // 5]


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
