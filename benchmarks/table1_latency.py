"""Claim: the compacted networks of table 1 are as fast as the table says, on a machine left alone.

How long a network takes depends on its sizes and not on its weights. For every run of table 1 a
network with the same sizes is compacted, its parameters and multiply-adds are compared with the
record's, and it is timed in turn with the dense one. Both times go into the record.

    python benchmarks/table1_latency.py [--runs results/table1]
    hardconcrete reproduce table1 --runs results/table1
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.paper.examination import latencies
from hardconcrete.paper.experiment import NETWORKS, Experiment, with_gates
from hardconcrete.paper.records import environment

DEAD = range(8)
"""Open gates of a group whose unit is dead since something else is shut, at most."""


def rebuilt(experiment: Experiment, row: dict[str, Any]) -> nn.Module:
    """A compacted network of the sizes in a record."""
    image = torch.zeros(1, 1, 28, 28)
    if experiment.method != "l0":
        return NETWORKS[experiment.network].build()
    gated = with_gates(NETWORKS[experiment.network], torch.device("cpu"))
    for dead in sorted(product(DEAD, repeat=len(row["units"])), key=sum):
        alive = [n - fewer for n, fewer in zip(row["units"], dead, strict=True)]
        if _size(alive) == (row["small_parameters"], row["small_flops"] // 2):
            break
    else:
        raise ValueError(f"no network has the sizes of {row['units']}")
    with torch.no_grad():
        gated.gates.log_alpha.fill_(-9.0)
        for group, n in zip(gated.groups, alive, strict=True):
            chosen = torch.arange(n)
            if group.units == 800:  # 16 pixels of each map: of every map that is open one at least
                chosen = (chosen % alive[1]) * 16 + chosen // alive[1]
            gated.gates.log_alpha[group.slice][chosen] = 9.0
    small = hc.compact(gated)
    counted = hc.count(small, image)
    assert (counted.params, 2 * counted.macs) == (row["small_parameters"], row["small_flops"])
    return small


def _size(alive: list[int]) -> tuple[int, int]:
    """Parameters and multiply-adds of an MLP or of LeNet-5."""
    *first, inputs, hidden = alive
    if len(first) == 1:  # inputs, hidden units, hidden units
        a, b, c = alive
        return (a + 1) * b + (b + 1) * c + (c + 1) * 10, a * b + b * c + c * 10
    one, two = first
    dense = inputs * hidden + hidden * 10
    weights = 25 * one + 25 * one * two + dense
    return weights + one + two + hidden + 10, 576 * 25 * one + 64 * 25 * one * two + dense


def main() -> None:
    """Time all runs and write the times into their records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("results/table1"))
    for path in sorted(parser.parse_args().runs.glob("*/record.json")):
        record = json.loads(path.read_text())
        settings = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record["settings"].items()
        }
        experiment = Experiment(**settings)
        for row in record["results"]:
            row["small_latency"], row["dense_latency"] = latencies(
                experiment, rebuilt(experiment, row)
            )
        record["timed"] = environment(torch.device("cpu"))
        path.write_text(json.dumps(record, indent=2) + "\n")
        times = [(row["small_latency"], row["dense_latency"]) for row in record["results"]]
        print(experiment.name, *(f"{small:.3f}/{dense:.3f}" for small, dense in times), flush=True)


if __name__ == "__main__":
    main()
