"""Claim: five seeds of a network of table 1, stacked, train in little more time than one.

Times an epoch of one and of five seeds, after a first one, and what it takes to get ready.

    python experiments/benchmarks/stacking.py [--data DIR] [--out FILE]
"""

import argparse
import json
import time
from pathlib import Path

import torch

from hardconcrete.demo.data import Images, load_mnist
from hardconcrete.report import environment
from hardconcrete_paper.mnist.experiment import NETWORKS, MnistExperiment, learner
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.engine import Engine

EPOCHS = 8


def timed(network: str, seeds: int, data: Images, device: torch.device) -> dict[str, object]:
    """Seconds to get ready, and of an epoch."""
    experiment = MnistExperiment(network, (0.1,), epochs=EPOCHS)
    start = time.perf_counter()
    learners = [learner(experiment, seed, len(data), device) for seed in range(seeds)]
    engine = Engine(learners, data, stacked=device.type == "cuda")
    ready = time.perf_counter() - start
    epochs = iter(engine)
    next(epochs)
    first = engine.seconds
    for _ in epochs:
        pass
    epoch = (engine.seconds - first) / (EPOCHS - 1)
    return {
        "network": network,
        "seeds": seeds,
        "seconds to get ready": round(ready, 1),
        "seconds of an epoch": round(epoch, 4),
        "seconds of 200 epochs": round(200 * epoch, 1),
    }


def main() -> None:
    """Time both networks and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    data = load_mnist("train", arguments.data)
    runs = []
    for network in NETWORKS:
        for seeds in (1, 5):
            runs.append(timed(network, seeds, data, device))
            print(json.dumps(runs[-1]), flush=True)
    if arguments.out:
        record = {"environment": environment(device), "runs": runs}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
