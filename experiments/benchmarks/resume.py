"""Claim: where a WRN-28-10 was compiled, its step and its checkpoint are in place in under 10 s.

Two processes, the second as one that resumes: it builds a network, has its step compiled and
captured as torch's cache of the first allows, and writes the checkpoint into it, which holds
weights, two averages, momentum, gates and the budget. The state has to be the one that was saved.

    python experiments/benchmarks/resume.py [--device auto] [--network wrn-28-10] [--out FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hardconcrete.demo.data import Images
from hardconcrete.report import environment
from hardconcrete_paper.cifar.experiment import CifarExperiment, cifar_learner
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.training.checkpoints import load
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.run_folder import RunFolder
from hardconcrete_paper.training.stacked_learners import start_compilers

BOUND = 10.0


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, until the device has done it too, and what it gives."""
    start = time.perf_counter()
    result = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return round(time.perf_counter() - start, 2), result


def engine(learner: Learner) -> Engine:
    """One that takes one step an epoch, on noise."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = Images(pixels, torch.arange(128) % 10, "noise")
    return Engine([learner], images, prepare=Preparation(CIFAR_STATISTICS[10]).to(learner.device))


def piece(place: Path, network: str, device: torch.device) -> dict[str, Any]:
    """Train for an epoch and save; or, where that was done, load, and compare."""
    start_compilers(device)
    experiment = CifarExperiment(variant="budget", network=network, noise=True, swa=0.6)
    to_trace, learner = seconds(lambda: cifar_learner(experiment, 50_000, device))
    to_build, made = seconds(lambda: engine(learner))
    folder = RunFolder(place)
    spent: dict[str, Any] = {"seconds_to_trace": to_trace, "seconds_to_build": to_build}
    if folder.checkpoint.exists():
        spent["seconds_to_load"], _ = seconds(lambda: load(made, folder))
        spent["ready"] = time.time()
        saved, *_ = folder.load() or ({},)
        now = {f"seed0.{name}": tensor.cpu() for name, tensor in learner.state().items()}
        spent["same_state"] = all(torch.equal(tensor, saved[name]) for name, tensor in now.items())
        return spent
    next(iter(made))
    state = {f"seed0.{name}": tensor.cpu() for name, tensor in learner.state().items()}
    to_save, _ = seconds(lambda: folder.save(state, epoch=1, seconds=0.0))
    return {**spent, "seconds_to_save": to_save, "bytes": folder.checkpoint.stat().st_size}


def main() -> None:
    """Run both pieces, each in a process of its own, with a fresh cache of compiled code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--network", default="wrn-28-10")
    parser.add_argument("--piece", type=Path, help="run one of the two, in this folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    if options.piece:
        print(json.dumps(piece(options.piece, options.network, device)))
        return
    with TemporaryDirectory() as path:
        command = [sys.executable, __file__, "--device", options.device, "--piece", path]
        command += ["--network", options.network]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{path}/code", "TRITON_CACHE_DIR": f"{path}/kernels"}
        how: Any = {"check": True, "stdout": subprocess.PIPE, "env": {**os.environ, **caches}}
        first = json.loads(subprocess.run(command, **how).stdout.splitlines()[-1])
        start = time.time()
        second = json.loads(subprocess.run(command, **how).stdout.splitlines()[-1])
    in_all = round(second.pop("ready") - start, 2)  # with Python, torch and the network's tracing
    ready = round(second["seconds_to_build"] + second["seconds_to_load"], 2)
    record = {
        "seed": 0,
        **environment(device),
        "network": options.network,
        "first": first,
        "resumed": second,
        "seconds_to_go_on": ready,
        "seconds_from_the_command": in_all,
        "bound": BOUND,
        "met": ready < BOUND and second["same_state"],
    }
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
