"""To be tested: a network trained under a budget beats one that was narrow from the beginning.

ResNet-14 on CIFAR-10 at 16 x 16 pixels, tested on held-out training images: dense; with all widths
times the root of the budget, which is about the budget in multiply-adds; and under the budget, from
two initial drop rates. All are trained alike. A few minutes for each on two CPU cores.

    PYTHONPATH=experiments python experiments/benchmarks/narrow.py [--budgets 0.5] [--out FILE]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from benchmarks.budgets import Task, train
from benchmarks.wide_latency import cut_to
from hardconcrete.demo import initialise
from hardconcrete.report import environment
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.data.cifar import load_cifar
from hardconcrete_paper.data.hold_out import hold_out
from hardconcrete_paper.models import ResNet
from hardconcrete_paper.training.device import choose_device


def halved_images(steps: int, data: Path | None, device: torch.device) -> Task:
    """CIFAR-10, normalised, half as wide and high, mirrored at random in training."""
    prepare = Preparation(CIFAR_STATISTICS[10]).eval().to(device)
    parts = [
        (F.avg_pool2d(prepare(part.images.to(device)), 2), part.labels.to(device))
        for part in hold_out(load_cifar(10, "train", data))
    ]
    (images, labels), held_out = parts

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(labels), (128,), device=device)
        mirrored = torch.rand(128, 1, 1, 1, device=device) < 0.5
        return torch.where(mirrored, images[rows].flip(3), images[rows]), labels[rows]

    test = list(zip(*(part.split(1000) for part in held_out), strict=True))
    return Task(lambda: ResNet(14), images[:1], batch, test, steps)


def narrow(example: Tensor, part: float) -> nn.Module:
    """The network with such a part of the units of every group, initialised as ever."""
    gated = hc.attach_gates(ResNet(14).to(example.device), example)
    small = cut_to(gated, [round(part * group.units) for group in gated.groups])
    initialise(small)
    return small.train()


def main() -> None:
    """Train everything and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.5, 0.25, 0.1])
    parser.add_argument("--droprates", type=float, nargs="*", default=[0.1, 0.5])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    task, rows = halved_images(arguments.steps, arguments.data, device), list[dict[str, Any]]()
    whole = hc.count(ResNet(14), task.example.cpu()).macs

    def note(how: str, macs: float, error: float, **more: float) -> None:
        rows.append({"how": how, "MACs": round(macs, 4), "error": error, **more})
        print(rows[-1], flush=True)
        if arguments.out:
            about = {"environment": environment(device), "seed": arguments.seed}
            about |= {"steps": arguments.steps, "tested on": "5,000 held-out training images"}
            arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")

    note("dense", 1.0, train(task, None, arguments.seed, device)["error"])
    for budget in arguments.budgets:
        model = narrow(task.example, budget**0.5)
        part = hc.count(model, task.example).macs / whole
        own = replace(task, build=lambda part=budget**0.5: narrow(task.example, part))  # type: ignore[misc]
        note("narrow", part, train(own, None, arguments.seed, device)["error"])
        for droprate in arguments.droprates:
            found = train(task, budget, arguments.seed, device, droprate=droprate)
            before = {"delivered": found["delivered"], "error before projection": found["error"]}
            how = f"budget {budget}, drop rate {droprate}"
            note(how, found["compacted"], found["compacted_error"], **before)


if __name__ == "__main__":
    main()
