"""A character-level GPT with half of its multiply-adds: a budget from scratch, narrow, pruned.

Every method trains for the same number of steps on the same batches of tinyshakespeare. The loss is
that of the last tenth of the text, in nats for a character. ``prune`` and ``prune-trained`` start
from the dense model; the latter trains for a tenth of the steps more. The gated and the small model
of the budget write a text from the same random numbers.

    python experiments/benchmarks/gpt.py --data input.txt.gz                    # a CPU, minutes
    python experiments/benchmarks/gpt.py --data input.txt.gz --size gpt2 --steps 600  # a GPU

It needs no install: PYTHONPATH=src:experiments/src:experiments is enough. Jobs that have a line in
--out are skipped.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import hardconcrete as hc
from benchmarks.characters.task import GPT, SIZES, Text, narrow, train
from hardconcrete.report import environment

METHODS = ("dense", "budget", "narrow", "prune", "prune-trained")
BATCHES_TO_PRUNE = 32


class Run:
    """All methods of one seed: of the weights and the batches."""

    def __init__(self, a: argparse.Namespace, seed: int) -> None:
        self.a, self.seed = a, seed
        self.size = SIZES[a.size]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text = Text(a.data, self.size, self.device)
        self.example = self.text.train[None, : self.size.length]
        self.trained: dict[str, nn.Module] = {}

    def fresh(self) -> nn.Module:
        """The dense model before training."""
        torch.manual_seed(self.seed)
        return GPT(len(self.text.alphabet), self.size).to(self.device)

    def dense(self) -> nn.Module:
        """The dense model, trained once."""
        if "dense" not in self.trained:
            self.trained["dense"] = train(self.fresh(), self.text, self.a.steps, self.seed)
        return self.trained["dense"]

    def budget(self, more: dict[str, Any]) -> nn.Module:
        """A budget from scratch. The small model must write what the gated one writes."""
        gated = hc.attach_gates(self.fresh(), self.example)
        budget = hc.Budget(gated, macs=self.a.macs, steps=self.a.steps)
        train(gated, self.text, self.a.steps, self.seed, budget)
        small = hc.compact(gated, budget=budget)
        texts = [self.text.write(model) for model in (gated, small)]
        more |= {"same_text": texts[0] == texts[1], "text": texts[1]}
        return small

    def prune(self, steps: int) -> nn.Module:
        """The dense model without half of its multiply-adds, and steps of training."""
        if "prune" not in self.trained:
            batches = self.text.batches(self.text.train, BATCHES_TO_PRUNE, seed=10**5)
            dense = self.dense()
            loss = self.text.loss
            self.trained["prune"] = hc.prune(dense, self.example, batches, loss, macs=self.a.macs)
        if steps:
            train(self.trained["prune"], self.text, steps, self.seed + 1)
        return self.trained["prune"]

    def run(self, method: str) -> None:
        """One job and its line."""
        start, more = time.perf_counter(), dict[str, Any]()
        if method == "dense":
            model = self.dense()
        elif method == "budget":
            model = self.budget(more)
        elif method == "narrow":
            torch.manual_seed(self.seed)
            model = narrow(len(self.text.alphabet), self.size, self.a.macs, self.example)
            train(model.to(self.device), self.text, self.a.steps, self.seed)
        else:
            model = self.prune(0 if method == "prune" else self.a.steps // 10)
        seconds = time.perf_counter() - start
        dense, small = (hc.count(each, self.example) for each in (self.fresh(), model))
        line = {
            "size": self.a.size, "steps": self.a.steps, "macs": self.a.macs, "seed": self.seed,
            "method": method, "loss": round(self.text.test_loss(model), 4),
            "macs_fraction": round(small.macs / dense.macs, 4), "params": small.params,
            "dense_params": dense.params, "seconds": round(seconds, 1), **more,
            **environment(self.device),
        }  # fmt: skip
        with self.a.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(method, self.seed, line["loss"], line["macs_fraction"], flush=True)


def main() -> None:
    """Run the jobs that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the text, plain or .gz")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--macs", type=float, default=0.5)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--out", type=Path, default=Path("results/gpt.jsonl"))
    a = parser.parse_args()
    keys = ("size", "steps", "macs", "seed", "method")
    lines = a.out.read_text().splitlines() if a.out.exists() else []
    done = {tuple(line[key] for key in keys) for line in map(json.loads, lines)}
    for seed in a.seeds:
        run = Run(a, seed)
        for method in a.methods:
            if (a.size, a.steps, a.macs, seed, method) not in done:
                run.run(method)


if __name__ == "__main__":
    main()
