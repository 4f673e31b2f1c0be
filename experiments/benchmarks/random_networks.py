"""Claim: of 2,000 random networks none is made small wrongly, and at most 14% have no units.

Every network is gated at random, its shut units are perturbed, and the compacted network is
compared with the gated one in float64, in both modes and at two batch sizes. A network that fails
is printed as a script. Half an hour on one core.

    PYTHONPATH=. python experiments/benchmarks/random_networks.py [--number 2000] [--out FILE]
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from hardconcrete.report import environment
from tests.units.verdict import verdict


def main() -> None:
    """Try all seeds and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    for done in range(arguments.number):
        found = verdict(arguments.first + done)
        counts[found.partition(":")[0]] += 1
        if ":" in found:
            print(found, flush=True)
        if (done + 1) % 100 == 0:
            print(f"{done + 1} of {arguments.number}: {dict(counts)}", flush=True)
    record = {
        "environment": environment(torch.device("cpu")),
        "first_seed": arguments.first,
        "networks": arguments.number,
        "seconds": round(time.perf_counter() - started),
        "results": dict(counts),
    }
    print(json.dumps(record))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
