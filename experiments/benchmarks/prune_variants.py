"""What limits ``hc.prune`` without training: variants of one step each, on held-out images.

- ``base``: six stages, 2,048 images in batches of 128.
- ``st12``: twelve stages.
- ``more``: 8,192 images, and four times the rows in each regression.

    python experiments/benchmarks/prune_variants.py --work DIR --data DIR [--out FILE]

``--work`` has the trained models of ``experiments/benchmarks/race.py run --validate``.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import hardconcrete as hc
from benchmarks.racing.data import Data
from benchmarks.racing.methods import batch_loss
from benchmarks.racing.networks import build, to_device
from benchmarks.racing.train import error
from hardconcrete.report import environment

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "st12": {"stages": 12},
    "more": {"examples": 8192},
}


def pruned(name: str, dense: nn.Module, data: Data, target: float) -> nn.Module:
    """The small model of a variant."""
    batches = list(data.batches(VARIANTS[name].get("examples", 2048)))
    return hc.prune(
        dense, data.example(), batches, batch_loss, macs=target, progress=False, **VARIANTS[name]
    )


def main() -> None:
    """Run all variants and append a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/prune_variants.jsonl"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--targets", nargs="+", type=float, default=[0.7, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    device = torch.device(a.device)
    data = Data("cifar10", True, a.data, device, False)
    for name, target, seed in product(a.variants, a.targets, a.seeds):
        dense = build("resnet20", 10)
        file = a.work / f"dense-resnet20-cifar10-held-out-12-0.2-{seed}.pt"
        dense.load_state_dict(torch.load(file, map_location="cpu")["state"])
        dense = to_device(dense, device).eval()
        start = time.perf_counter()
        small = pruned(name, dense, data, target)
        seconds = round(time.perf_counter() - start, 1)
        line = {"name": name, "target": target, "seed": seed, "dense": error(dense, data)}
        line |= {"error": error(small, data), "seconds": seconds, **environment(device)}
        print(json.dumps(line), flush=True)
        with a.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
