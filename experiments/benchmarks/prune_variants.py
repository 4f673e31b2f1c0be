"""What limits ``hc.prune`` without training: variants of one step each, on held-out images.

- ``base``: six stages, 2,048 images in batches of 128.
- ``st12``: twelve stages.
- ``more``: 8,192 images, and four times the rows in each regression.
- ``ablate``: a unit's importance is the exact increase of the loss of 1,024 images when it goes.

    python benchmarks/prune_variants.py --work DIR --data DIR --out results/prune_variants.jsonl

``--work`` has the trained models of ``benchmarks/race.py run --validate``.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

import hardconcrete as hc
from benchmarks.racing.data import Data
from benchmarks.racing.methods import batch_loss
from benchmarks.racing.networks import build, to_device
from benchmarks.racing.train import error
from hardconcrete.importance import stages
from hardconcrete.report import environment
from hardconcrete.structure.undisturbed import in_mode

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "st12": {"stages": 12},
    "more": {"examples": 8192},
    "ablate": {},
}
ABLATED_BATCHES = 8
"""Batches of 128 images for the exact increase of the loss."""


@torch.no_grad()
def exact_increase(gated: hc.GatedModel, batches: Any, loss: Any, is_open: Tensor) -> Tensor:
    """How much the loss grows when each unit alone goes."""
    images, labels = (torch.cat(parts) for parts in zip(*batches[:ABLATED_BATCHES], strict=True))

    def loss_of(gates: Tensor) -> float:
        with gated.gates.holding(None, gates):
            return float(loss(gated.model, (images, labels)))

    increase = torch.zeros(len(is_open), dtype=torch.float64)
    with in_mode(gated, training=False):
        before = loss_of(is_open)
        for unit in is_open.nonzero().flatten().tolist():
            gates = is_open.clone()
            gates[unit] = 0
            increase[unit] = max(loss_of(gates) - before, 0) + 1e-9
    return increase


def pruned(name: str, dense: nn.Module, data: Data, target: float) -> nn.Module:
    """The small model of a variant."""
    batches = list(data.batches(VARIANTS[name].get("examples", 2048)))
    measure = exact_increase if name == "ablate" else stages.measure_importance
    with patch.object(stages, "measure_importance", measure):
        return hc.prune(
            dense, data.example(), batches, batch_loss, macs=target, progress=False,
            **VARIANTS[name],
        )  # fmt: skip


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
