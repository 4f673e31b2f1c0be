"""Claim: 10^6 gates are sampled and differentiated in at most 3x the time of sigmoid and uniform.

The yardstick draws a uniform number and takes a sigmoid for each gate, forward and backward.
Both are timed alternately in one process; the ratio of the medians is what counts.

    python experiments/benchmarks/sampling.py [--out FILE]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

import hardconcrete as hc

GATES = 1_000_000


def yardstick(log_alpha: torch.Tensor) -> None:
    """A uniform number and a sigmoid per gate, differentiated."""
    (torch.sigmoid(log_alpha) * torch.rand_like(log_alpha)).sum().backward()


def gates(log_alpha: torch.Tensor) -> None:
    """A hard concrete sample per gate, differentiated."""
    hc.HardConcrete(log_alpha).rsample().sum().backward()


def milliseconds(step: Callable[[torch.Tensor], None], log_alpha: torch.Tensor) -> float:
    """Time of one step."""
    log_alpha.grad = None
    start = time.perf_counter()
    step(log_alpha)
    if log_alpha.is_cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def compare(device: str, rounds: int = 30) -> dict[str, float]:
    """Medians of both and their ratio, after a warm-up."""
    log_alpha = torch.zeros(GATES, device=device, requires_grad=True)
    pairs = [(milliseconds(yardstick, log_alpha), milliseconds(gates, log_alpha)) for _ in range(5)]
    pairs = [
        (milliseconds(yardstick, log_alpha), milliseconds(gates, log_alpha)) for _ in range(rounds)
    ]
    plain, gated = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"sigmoid_and_uniform_ms": plain, "hard_concrete_ms": gated, "ratio": gated / plain}


def main() -> None:
    """Measure on the CPU, and on a GPU where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    record = {
        "gates": GATES,
        "seed": "none: the time does not depend on the values drawn",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.system()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        **{device: compare(device) for device in devices},
    }
    text = json.dumps(record, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
