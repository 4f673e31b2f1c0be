"""Claim: on 2 CPU cores LeNet-5 at the paper's widths is at least 2.3x faster at batch 64.

Gates leave 9-18-65-25 of 20-50-800-500 units, as in the last row of table 1; the compacted network
is timed against the dense one, each in its best memory layout. With --small it is a trained one.

    python experiments/benchmarks/latency.py [--small FILE] [--out FILE]
"""

import argparse
import json
import platform
from datetime import date
from pathlib import Path

import torch

import hardconcrete as hc
from hardconcrete_paper.models import LeNet5

WIDTHS = {"conv1:out": 9, "conv2:out": 18, "fc1:in": 65, "fc2:in": 25}
BOUND = 2.3


def small_network() -> torch.nn.Module:
    """LeNet-5 with the paper's gates, as many open as its table says."""
    torch.manual_seed(0)
    gated = hc.attach_gates(LeNet5(), torch.randn(2, 1, 28, 28), sites=[*WIDTHS])
    with torch.no_grad():
        gated.gates.log_alpha.fill_(-9.0)
        for group in gated.groups:
            own = gated.gates.log_alpha[group.slice]
            if group.name == "fc1:in":  # spread over the positions of the maps that are left
                alive = torch.arange(18 * 16)[torch.randperm(18 * 16)[:65]]
                own[alive] = 9.0
            else:
                own[: WIDTHS[group.name]] = 9.0
    return hc.compact(gated)


def main() -> None:
    """Measure and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=Path, help="small-0.safetensors of a LeNet-5")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    small = hc.load(arguments.small, LeNet5()) if arguments.small else small_network()
    images = torch.rand(64, 1, 28, 28)
    layouts = ("contiguous", "channels_last")
    report = hc.measure(LeNet5(), small, images, repeats=200, layouts=layouts)
    print(hc.CompactionPlan.of(small))
    print(report)
    if arguments.out:
        record = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "seed": 0,
            "bound": BOUND,
            "plan": str(hc.CompactionPlan.of(small)).splitlines(),
            **report.to_dict(),
        }
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
