"""Claim: on 2 CPU cores a gated training step costs little more than a dense one.

MLP at batch 100: at most 1.5x eager and 1.1x compiled; LeNet-5 at batch 128: at most 1.08x.
A step is forward, loss with penalty, backward and Adam. Dense and gated steps alternate in one
process, and the ratio of their medians is taken three times; what counts is the median over seven
processes, for some of them are half as fast as others on a machine that is shared.

    python experiments/benchmarks/step.py [--out FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.report import environment
from hardconcrete_paper.mnist.experiment import NETWORKS, lambdas, with_gates

Step = Callable[[], None]
PROCESSES = 7
CASES = [("mlp", 100, False, 1.5), ("mlp", 100, True, 1.1), ("lenet5", 128, False, 1.08)]


def steps(network: str, batch: int, compiled: bool) -> tuple[Step, Step]:
    """A dense and a gated training step on the same batch."""
    torch.manual_seed(0)
    images, labels = torch.rand(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    gated = with_gates(NETWORKS[network], torch.device("cpu"))
    penalty = hc.L0Penalty(gated, lambdas(gated, (0.1,), 60_000))
    dense = NETWORKS[network].build()

    def dense_loss() -> torch.Tensor:
        return F.cross_entropy(dense(images), labels)

    def gated_loss() -> torch.Tensor:
        return F.cross_entropy(gated(images), labels) + penalty()

    def step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
        is_gated = isinstance(model, hc.GatedModel)
        groups = hc.parameter_groups(model, lr=1e-3) if is_gated else model.parameters()
        optimizer = torch.optim.Adam(groups, lr=1e-3)
        loss = torch.compile(loss, fullgraph=True) if compiled else loss

        def run() -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        return run

    return step(dense, dense_loss), step(gated, gated_loss)


def milliseconds(step: Step) -> float:
    """Time of one step."""
    start = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - start)


def compare(dense: Step, gated: Step, rounds: int) -> tuple[float, float]:
    """Medians of alternating steps."""
    pairs = [(milliseconds(dense), milliseconds(gated)) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return first, second


def measured(network: str, batch: int, compiled: bool) -> tuple[float, float, float]:
    """The ratio, the median of three, and the milliseconds of a dense and of a gated step."""
    dense, gated = steps(network, batch, compiled)
    compare(dense, gated, rounds=10)
    repeats = [compare(dense, gated, 200 if network == "mlp" else 40) for _ in range(3)]
    return statistics.median_low([(second / first, first, second) for first, second in repeats])


def case(network: str, batch: int, compiled: bool, bound: float) -> dict[str, object]:
    """One line of the record, from several processes that have done nothing else."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = [pool.apply(measured, (network, batch, compiled)) for _ in range(PROCESSES)]
    ratios, dense, gated = zip(*found, strict=True)
    return {
        "network": network,
        "batch": batch,
        "compiled": compiled,
        "dense_ms": [round(each, 3) for each in dense],
        "gated_ms": [round(each, 3) for each in gated],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "bound": bound,
    }


def main() -> None:
    """Measure every case and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    cases = []
    for each in CASES:
        cases.append(case(*each))
        print(json.dumps(cases[-1]), flush=True)
    record = {"seed": 0, **environment(torch.device("cpu")), "cases": cases}
    if out:
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
