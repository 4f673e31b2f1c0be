"""Claim: of 2,000 random networks none is made small wrongly, and at most 14% have no units.

Every network is gated at random, its shut units are perturbed, and the compacted network is
compared with the gated one in float64, in both modes and at two batch sizes. A network that fails
is printed as a script. Half an hour on one core.

    python -m benchmarks.random_networks [--first 1000] [--number 2000] [--out FILE]
"""

import argparse
import json
import time
from collections import Counter
from datetime import date
from pathlib import Path

import torch

import hardconcrete as hc
from tests.exactness import assert_exact
from tests.structure.random_networks import random_network

TOLERANCE = 1e-9


def verdict(seed: int) -> str:
    """How one network ended: a form, no units, refused, or wrong."""
    network, inputs, script = random_network(seed)
    try:
        small = assert_exact(network, lambda batch: (inputs(batch), {}), seed, TOLERANCE)
        return hc.CompactionPlan.of(small).form
    except hc.HardConcreteError as refusal:
        if "no units that could be removed" in str(refusal):
            return "no units"
        print(f"seed {seed} refused: {refusal}\n{script}", flush=True)
        return "refused"
    except Exception as error:
        print(f"seed {seed} wrong: {type(error).__name__}: {error}\n{script}", flush=True)
        return "wrong"


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
        counts[verdict(arguments.first + done)] += 1
        if (done + 1) % 100 == 0:
            print(f"{done + 1} of {arguments.number}: {dict(counts)}", flush=True)
    record = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
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
