"""Claim: a WRN-28-10 within a budget goes on from its checkpoint in under 10 s, compiling aside.

The checkpoint holds weights, two averages, momentum, gates and the budget. Saving, reading it and
writing it into a fresh network are timed, and, apart from them, how long that one takes to build.

    python benchmarks/resume.py [--device auto] [--out results/resume.json]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hardconcrete.paper.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete.paper.datasets import Images
from hardconcrete.paper.engine import Engine
from hardconcrete.paper.mnist import choose_device
from hardconcrete.paper.records import RunFolder, environment
from hardconcrete.paper.training import load
from hardconcrete.paper.wide import WideExperiment, wide_learner

BOUND = 10.0


def engine(seed: int, device: torch.device) -> Engine:
    """One that takes one step an epoch, on noise."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = Images(pixels, torch.arange(128) % 10, "noise")
    experiment = WideExperiment(variant="budget", noise=True, swa=0.6, seed=seed)
    learner = wide_learner(experiment, len(images), device)
    return Engine([learner], images, prepare=Preparation(CIFAR_STATISTICS[10]).to(device))


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    """How long it takes, until the device has done it too."""
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - start, 2)


def main() -> None:
    """Train for an epoch, save, load into another network, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    first, second = engine(0, device), engine(0, device)
    next(iter(first))
    (trained,), (other,) = first.learners, second.learners
    with TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        state = {f"seed0.{name}": value.cpu() for name, value in trained.state().items()}
        saving = seconds(lambda: folder.save(state, epoch=1, seconds=0.0), device)
        size = folder.checkpoint.stat().st_size
        loading = seconds(lambda: load(second, folder), device)
    same = all(torch.equal(value, other.state()[name]) for name, value in trained.state().items())
    record = {
        "seed": 0,
        **environment(device),
        "bytes": size,
        "seconds_to_save": saving,
        "seconds_to_load": loading,
        "bound": BOUND,
        "met": loading < BOUND,
        "same_state": same,
        "seconds_to_build": round(second.seconds_to_build, 1),
    }
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
