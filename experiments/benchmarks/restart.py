"""To be tested: setting the scale of prices back as well, when satisfied, trains a better network.

The MLP on MNIST at half, a quarter and a tenth of the multiply-adds, tested on held-out training
images: the scale kept, as a budget by gates does; set back to its first value at once after the
warm-up; or brought there by 1% a step.

    python -m benchmarks.restart [--steps 3000] [--data DIR] [--out results/restart.json]
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.budgets import BUDGETS, Task, train
from hardconcrete.demo import MLP
from hardconcrete.demo.data import load_mnist
from hardconcrete.objective import FIRST, LearnedBudget
from hardconcrete.report import environment
from hardconcrete_paper.data.hold_out import hold_out

FALLS = {"kept": 0.0, "restarted at once": -math.inf, "falling by 1% a step": math.log(0.99)}
"""What is added to the logarithm of the scale, down to its first value."""


class Restarting(LearnedBudget, by="gates, restarting"):
    """A budget whose scale falls while it is satisfied, after the warm-up."""

    falls = 0.0

    def _advance(self, steps: int) -> None:
        super()._advance(steps)
        error = self._error(self._delivered(self._open()))
        satisfied = (error <= 0) & (self._progress() == 1)
        fallen = (self._log_scale + self.falls).clamp(min=math.log(FIRST))
        self._log_scale.copy_(torch.where(satisfied, fallen, self._log_scale))
        self._begin()


def digits(steps: int, data: Path | None) -> Task:
    """Handwritten digits in batches of 100; 5,000 of the training set are held out."""
    training, held_out = hold_out(load_mnist("train", data))
    images, tests = (each.images.float().div_(255) for each in (training, held_out))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(len(images), (100,))
        return images[rows], training.labels[rows]

    return Task(MLP, images[:1], batch, [(tests, held_out.labels)], steps)


def main() -> None:
    """Train all and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    task = digits(arguments.steps, arguments.data)
    rows: list[dict[str, Any]] = []
    for fraction in BUDGETS:
        for name, falls in FALLS.items():
            Restarting.falls = falls
            runs = [
                train(task, fraction, seed, torch.device("cpu"), Restarting)
                for seed in arguments.seeds
            ]
            errors = [run["error"] for run in runs]
            rows.append({"budget": fraction, "scale": name, "errors": errors})
            rows[-1]["median error"] = statistics.median(errors)
            rows[-1]["off"] = [run["off"] for run in runs]
            print(rows[-1], flush=True)
    record = {
        "environment": environment(torch.device("cpu")),
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "tested on": "5,000 held-out training images",
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
