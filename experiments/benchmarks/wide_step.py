"""To be tested: on a GPU a gated step of WRN-28-10 takes no more than 2% longer than a dense one.

Both with the engine of the experiments: bf16, channels last, compiled, replayed as a CUDA graph,
batch 128, augmentation, SGD and averaging included. Medians of turns. The rate of a
large matrix product shows how much of the card is used.

    python experiments/benchmarks/wide_step.py [--network wrn-28-10] [--out FILE]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hardconcrete as hc
from hardconcrete.demo.data import Images
from hardconcrete.report import environment
from hardconcrete_paper.cifar.experiment import CifarExperiment, cifar_learner
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.engine import Engine

VARIANTS = ("dense", "l0", "budget")


def made_up(count: int) -> Images:
    """Noise of CIFAR's shape: the time of a step does not depend on what is seen."""
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    return Images(images, torch.arange(count) % 10, "noise")


def prepared(network: str, variant: str, device: torch.device) -> dict[str, Any]:
    """An engine, ready to step, and what it took to get there."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    start = time.perf_counter()
    experiment: Any = CifarExperiment(network=network, variant=variant)  # type: ignore[arg-type]
    data = made_up(12_800)
    learner = cifar_learner(experiment, 50_000, device)
    prepare = Preparation(CIFAR_STATISTICS[10]).to(device)
    engine = Engine([learner], data, prepare=prepare)
    engine.stacks[0].begin_epoch(0)
    ready = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() - others if device.type == "cuda" else None
    return {"engine": engine, "ready": round(ready, 1), "memory": memory, "times": []}


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Tera-operations per second of a bfloat16 product."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        left @ right
    torch.cuda.synchronize()
    return 50 * 2 * size**3 / (time.perf_counter() - start) / 1e12


def main() -> None:
    """Time all variants in turn and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="wrn-28-10")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    made = {name: prepared(arguments.network, name, device) for name in VARIANTS}
    for turn in range(arguments.turns):
        for name in VARIANTS[:: -1 if turn % 2 else 1]:
            engine: Engine = made[name]["engine"]
            engine.stacks[0].done.zero_()
            wait()
            start = time.perf_counter()
            for _ in range(arguments.steps):
                engine._step()
            wait()
            made[name]["times"].append((time.perf_counter() - start) / arguments.steps)
    counted = hc.count(
        CifarExperiment(network=arguments.network).build(), torch.zeros(1, 3, 32, 32)
    )
    record: dict[str, Any] = {"environment": environment(device), "network": arguments.network}
    rate = matrix_rate(device) if device.type == "cuda" else None
    for name, found in made.items():
        seconds = statistics.median(found["times"])
        record[name] = {
            "ms": round(1000 * seconds, 3),
            "images_per_second": round(128 / seconds, 1),
            "against dense": round(seconds / statistics.median(made["dense"]["times"]), 4),
            "seconds to get ready": found["ready"],
            "peak_memory": found["memory"],
        }
        if rate is not None:  # forward, and twice that for backward
            record[name]["part of the matrix rate"] = round(
                6 * 128 * counted.macs / seconds / 1e12 / rate, 4
            )
    record["matrix rate, TFLOP/s"] = None if rate is None else round(rate, 1)
    print(json.dumps(record, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
