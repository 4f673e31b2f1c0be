"""Claim: batch norms are estimated on augmented images; how open gates are read makes no odds.

Trains a row of table 2 as `hardconcrete-paper wrn --validate` does, without shrinking, then
reads its gates in two ways, by the paper's rule (eq. 13) or with the mean E[z] of each that this
leaves open, and estimates its batch norms on augmented or on plain training images, on some or on
all of them. The test set stays closed. Adds lines of JSON to a file.

    python experiments/benchmarks/wide_readout.py --network wrn-28-10 --epochs 40 [--out FILE]
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import hardconcrete as hc
from hardconcrete.demo import error_rate
from hardconcrete.report import environment
from hardconcrete_paper.cifar.experiment import CifarExperiment, cifar_learner
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.data.cifar import load_cifar
from hardconcrete_paper.data.hold_out import hold_out
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.stacked_learners import start_compilers

BATCHES = {
    "augmented, 20": (True, 20),
    "augmented, 100": (True, 100),
    "augmented, all": (True, None),
    "plain, 100": (False, 100),
    "plain, all": (False, None),
}
"""On which training images batch norms are estimated: whether augmented, and how many batches."""


def main() -> None:
    """Train, and write down the error of every way to test it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="wrn-28-10")
    parser.add_argument("--variant", default="budget")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("wide_readout.jsonl"))
    given = parser.parse_args()
    device = choose_device(given.device)
    start_compilers(device)
    settings: Any = {"variant": given.variant, "noise": given.variant == "budget"}
    settings |= {"network": given.network, "epochs": given.epochs, "seed": given.seed}
    experiment = CifarExperiment(**settings, validate=True)
    training, held_out = hold_out(load_cifar(10, "train", given.data))
    learner = cifar_learner(experiment, len(training), device)
    prepare = Preparation(CIFAR_STATISTICS[10]).to(device)
    engine = Engine([learner], training, prepare=prepare)
    for epoch in engine:
        print(f"epoch {epoch}: loss {engine.losses[0]:.3f}, {engine.seconds:.0f} s", flush=True)

    def batches(augmented: bool, count: int | None) -> Any:
        prepare.train(augmented)
        parts = islice(training.images.split(128), count)
        return [prepare(part.to(device)) for part in parts]

    plain = Preparation(CIFAR_STATISTICS[10]).to(device).eval()
    about = {**experiment.settings(), "environment": environment(device)}

    def write(**found: Any) -> None:
        print(json.dumps(found), flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps({**about, **found}) + "\n")

    gated: Any = learner.averaged
    gates = gated.gates.distribution()
    paper, mean = gates.readout("paper").detach(), gates.readout("mean").detach()
    ways = {"paper": paper, "mean": torch.where(paper > 0, mean, 0.0)}
    cost = round(gated.delivered("macs").item())
    write(delivered=cost, error=error_rate(gated, held_out, prepare=plain), readout="paper")
    for readout, values in ways.items():
        gated.gates.readout = lambda values=values: values
        for name, how in BATCHES.items():
            hc.recalibrate(gated, batches(*how))
            error = error_rate(gated, held_out, prepare=plain)
            write(delivered=cost, error=error, readout=readout, batches=name)


if __name__ == "__main__":
    main()
