"""Claim: re-fitting takes memory for one Gram matrix, and seconds for layers of usual widths.

One layer of each width is re-fitted to itself, every input kept, in a process of its own: what the
process has needed at most beyond what it had before, and the time of the call.

    python experiments/benchmarks/refit.py [--out FILE]
"""

import argparse
import copy
import json
import multiprocessing
import platform
import resource
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardconcrete.importance import refit

SEED = 0
BATCHES, EXAMPLES = 8, 128
IMAGE = 8
"""Height and width of what a convolution reads."""

WIDTHS = {"dense": (256, 512, 1024, 2048), "3 x 3 convolution": (32, 64, 128, 256)}


def layer(kind: str, width: int) -> tuple[nn.Module, torch.Tensor]:
    """As many outputs as inputs, and batches for it."""
    if kind == "dense":
        return nn.Linear(width, width), torch.randn(BATCHES, EXAMPLES, width)
    images = torch.randn(BATCHES, EXAMPLES, width, IMAGE, IMAGE)
    return nn.Conv2d(width, width, 3, padding=1, bias=False), images


def peak_mib() -> float:
    """The most memory that this process has had."""
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(kind: str, width: int, device: str) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(SEED)
    dense, x = layer(kind, width)
    dense, x = dense.to(device), x.to(device)
    small, before = copy.deepcopy(dense), peak_mib()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    start = time.perf_counter()
    refit(small, dense, x.unbind(), lambda model, batch: model(batch))
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_mib()
    columns = dense.weight[0].numel()
    return {
        "layer": kind,
        "width": width,
        "inputs": columns,
        "Gram matrix, MiB": 8 * columns**2 / 2**20,
        "peak, MiB": round(peak - before, 1),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure every width on the CPU, and on a GPU where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    cases = [(kind, width) for kind, widths in WIDTHS.items() for width in widths]
    rows: dict[str, list[dict[str, Any]]] = {device: [] for device in devices}
    spawn = multiprocessing.get_context("spawn")
    for device in devices:
        for kind, width in cases:
            with spawn.Pool(1) as pool:
                rows[device].append(pool.apply(measure, (kind, width, device)))
            print(device, rows[device][-1], flush=True)
    record = {
        "examples": BATCHES * EXAMPLES,
        "batches": BATCHES,
        "image": f"{IMAGE} x {IMAGE}",
        "seed": SEED,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{platform.machine()}, {platform.system()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        **rows,
    }
    if out:
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
