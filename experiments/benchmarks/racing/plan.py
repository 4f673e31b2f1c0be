"""What jobs cost, from measured speeds: for the order in which they run, and to plan a session."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.racing.jobs import Job
from benchmarks.racing.train import BATCH
from hardconcrete.objective import DESCENT_END, DESCENT_START


@dataclass(frozen=True)
class Speed:
    """How fast an H200 trains a dense network.

    Args:
        images: per second, of all processes together.
        processes: how many share the GPU.
        source: where the number comes from.
    """

    images: float
    processes: int
    source: str


SPEEDS: Mapping[str, Speed] = {
    "resnet20": Speed(90_000, 15, "measured"),
    "resnet56": Speed(30_000, 15, "a third of resnet20: it has 2.8 times the layers"),
    "resnet20x4": Speed(30_000, 15, "a guess: 16 times the MACs of resnet20, better used"),
    "wrn-28-10": Speed(11_500, 1, "measured, compiled"),
    "vgg16bn": Speed(45_000, 15, "a guess"),
    "lenet5": Speed(300_000, 15, "a guess"),
    "vit-tiny": Speed(30_000, 4, "a guess: nine times the MACs of resnet20, in large products"),
}

FIXED_PART = 0.5
"""The part of a step that does not get shorter with the MACs: half of what is saved is seen."""

PRUNING_SECONDS = 8.0
"""What pruning, starting and testing cost one process."""

COMPILING_SECONDS = 40.0
"""To compile and capture one step; a budget needs it again when units are taken out."""


def image_passes(job: Job) -> int:
    """Images that are trained on, counted once in every epoch."""
    return job.work() * BATCH


def dense_passes(job: Job) -> float:
    """As many image passes of the dense network take the same time."""
    in_all = image_passes(job)
    if job.method in ("dense", "ours-gates"):
        return in_all
    small = FIXED_PART + (1 - FIXED_PART) * job.target
    if job.method in ("ours-scratch", "ours-budget"):
        return in_all * (
            DESCENT_START
            + (DESCENT_END - DESCENT_START) * (1 + small) / 2
            + (1 - DESCENT_END) * small
        )
    if job.method == "tp-reg":
        return in_all * (1 + small) / 2
    return in_all * small


def seconds(job: Job) -> float:
    """What a job takes of the machine, as a part of all that its processes do."""
    speed = SPEEDS[job.network]
    fixed = PRUNING_SECONDS
    if job.compiled:
        fixed += COMPILING_SECONDS * (2 if job.method.startswith("ours") else 1)
    return dense_passes(job) / speed.images + fixed / speed.processes


def show_plan(jobs: Iterable[Job]) -> None:
    """Print what each kind of job costs, and the minutes of all together."""
    jobs = list(jobs)
    print("| network | cell | method | target | jobs | image passes each | minutes each |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    kinds = Counter((job.network, job.cell, job.method, job.target) for job in jobs)
    first = {(job.network, job.cell, job.method, job.target): job for job in reversed(jobs)}
    for kind, number in kinds.items():
        job = first[kind]
        words = " | ".join(map(str, kind))
        print(f"| {words} | {number} | {image_passes(job):,} | {seconds(job) / 60:.2f} |")
    for network in dict.fromkeys(job.network for job in jobs):
        own, speed = [job for job in jobs if job.network == network], SPEEDS[network]
        print(
            f"{network}: {len(own)} jobs, {sum(map(image_passes, own)):,} image passes, "
            f"{sum(map(seconds, own)) / 60:.1f} minutes at {speed.images:,.0f} images a second "
            f"({speed.source}; {speed.processes} processes together)"
        )
    print(f"all: {sum(map(seconds, jobs)) / 60:.1f} minutes, starting not counted")
