r"""Claim to be tested: predicted latency is within 15% of the compacted network's, on CPU.

LeNet-5 and ResNet-20 with automatic gates, at random widths: every group keeps between a tenth and
all of its units. In one process the compacted networks are timed before and after the table is
measured, ten calls of each in its turn: a network in use runs by itself, with its weights in the
caches. All that is done again, five times: every pair of table and network counts, and their median
is shown beside. Within each, other processes only add time: of the calls of an operator or of a
network that one counts which a fifth are faster than.

The GNU C library gives memory back to the system after some forwards and not after others, and
then every page of it costs again. That is turned off, for no table can foresee it.

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=4000000000 \
    python experiments/benchmarks/latency_prediction.py [--threads 2] [--out FILE]
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.cost import first_quintile, interleaved
from hardconcrete.report import environment
from hardconcrete_paper.models import LeNet5, ResNet

BOUND = 0.15
PATTERNS = 8
NETWORKS = {"LeNet-5": (LeNet5, (1, 28, 28)), "ResNet-20": (lambda: ResNet(20), (3, 32, 32))}
BATCHES = (1, 64)


def shut_some(gated: hc.GatedModel, seed: int) -> None:
    """Random widths; all open for seed 0."""
    torch.manual_seed(seed)
    for group in gated.groups:
        share = 0.1 + 0.9 * torch.rand(()) if seed else torch.tensor(1.1)
        is_open = torch.rand(group.units) < share
        gated.gates.log_alpha.data[group.slice] = torch.where(is_open, 9.0, -9.0)


def timed(models: list[nn.Module], x: torch.Tensor, seconds: float) -> list[list[float]]:
    """Milliseconds of calls, for so many seconds; each model in its turn by itself, as in use."""
    times: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        started = time.perf_counter()
        while time.perf_counter() - started < seconds or len(times[0]) < 20:
            for own, model in zip(times, models, strict=True):
                own += interleaved([partial(model, x)], repeats=10)[0]
    return times


def compare(name: str, batch: int, seconds: float, sessions: int, first: int) -> dict[str, Any]:
    """Predicted and measured, for every pattern of gates."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    gated = hc.attach_gates(make(), torch.randn(2, *shape))
    dense, models, patterns = gated.ledger.dense[1].item(), [], []
    for seed in range(first, first + PATTERNS):
        shut_some(gated, seed)
        models.append(hc.compact(gated).eval())
        patterns.append((gated.gates.readout() > 0, gated.delivered("macs").item() / dense))
    rows: list[dict[str, Any]] = [
        {"seed": first + k, "macs": macs, "predicted_ms": [], "measured_ms": []}
        for k, (_, macs) in enumerate(patterns)
    ]
    tables = []
    for _ in range(sessions):
        x = torch.randn(batch, *shape)
        before = timed(models, x, seconds / 2)
        tables.append(gated.measure_latency(batch=batch, fresh=True))
        after = timed(models, x, seconds / 2)
        for row, *own, (is_open, _) in zip(rows, before, after, patterns, strict=True):
            row["predicted_ms"].append(tables[-1].delivered(is_open).item())
            row["measured_ms"].append(first_quintile([*chain(*own)]))
    for row in rows:
        pairs = zip(row["predicted_ms"], row["measured_ms"], strict=True)
        row["errors"] = [predicted / own - 1 for predicted, own in pairs]
        row["error"] = statistics.median(row["errors"])
    errors = [abs(row["error"]) for row in rows]
    single = [abs(error) for row in rows for error in row["errors"]]
    return {
        "network": name,
        "batch": batch,
        "table": str(tables[-1]),
        "dense_ms_of_all_tables": [table.dense for table in tables],
        "scales": [table.scale for table in tables],
        "patterns": rows,
        "largest_error": max(errors),
        "mean_error": statistics.mean(errors),
        "largest_error_of_a_pair": max(single),
        "pairs": len(single),
        "pairs_beyond": sum(error > BOUND for error in single),
    }


def main() -> None:
    """Measure and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=5, help="tables, and timings around each")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing around each table")
    parser.add_argument("--first", type=int, default=0, help="seed of the first pattern")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "memory": {name: value for name, value in os.environ.items() if "MALLOC" in name},
        "bound": BOUND,
        "results": [],
    }
    for name in NETWORKS:
        for batch in BATCHES:
            how = arguments.seconds, arguments.sessions, arguments.first
            result = compare(name, batch, *how)
            record["results"].append(result)
            print(f"\n{name}, batch {batch}: {result['table']}")
            print("seed   MACs  predicted  measured   error   of all pairs")
            for row in result["patterns"]:
                both = (row["predicted_ms"], row["measured_ms"])
                predicted, own = map(statistics.median, both)
                print(
                    f"{row['seed']:4} {row['macs']:6.1%} {predicted:10.3f} {own:9.3f} "
                    f"{row['error']:+7.1%}  {min(row['errors']):+.1%} to {max(row['errors']):+.1%}"
                )
            print(
                f"largest {result['largest_error']:.1%}, mean {result['mean_error']:.1%}; "
                f"{result['pairs_beyond']} of {result['pairs']} pairs beyond {BOUND:.0%}"
            )
    record["met"] = not any(result["pairs_beyond"] for result in record["results"])
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
