"""Claim: the L2 term of section 2.3 lowers LeNet-5's error with lambda sep., and not the MLP's.

Trains a row with several coefficients, all seeds stacked, with the term felt by weights and gates
(eq. 17) or by the weights alone, and with gates drawn per batch or per example, which changes
nothing; tests on 5,000 held-out training images, and the test set stays closed. Adds a line of JSON
per network to a file, so that several calls can share it, and means over seeds to a table beside
it. On an H200 a coefficient takes one and a half minutes for eight LeNet-5, half a minute for four
MLPs.

    python experiments/benchmarks/decay.py lenet5 --lam 10 0.5 0.1 10 --decay 0 1e-4 5e-4
    python experiments/benchmarks/decay.py --out results/decay/control.jsonl  # the table alone
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from hardconcrete.demo import error_rate
from hardconcrete.demo.data import load_mnist
from hardconcrete.report import environment
from hardconcrete_paper.data.hold_out import hold_out
from hardconcrete_paper.mnist import experiment as experiments
from hardconcrete_paper.training.checkpoints import is_snapshot
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.engine import Engine

COLUMNS = ("network", "lambda", "decay", "felt by", "drawn per", "seeds", "units", "error", "+-")


def main() -> None:
    """Train what is asked for, and make the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=[*experiments.NETWORKS], nargs="?")
    parser.add_argument("--lam", type=float, nargs="+", default=[0.1])
    parser.add_argument("--decay", type=float, nargs="+", default=[0.0, 1e-4, 5e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--per-example", action="store_true", help="gates for every example")
    parser.add_argument("--still-gates", action="store_true", help="only the weights feel it")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("decay.jsonl"))
    given = parser.parse_args()
    if given.network:
        train(given)
    written = table(given.out)
    print(written, end="")
    given.out.with_suffix(".md").write_text(written)


def train(given: argparse.Namespace) -> None:
    """Train every coefficient and write down what is left, and the errors on the way."""
    device = choose_device(given.device)
    training, held_out = hold_out(load_mnist("train", given.data))
    about = {"network": given.network, "lam": given.lam, "moves_gates": not given.still_gates}
    about |= {"epochs": given.epochs, "sample": "example" if given.per_example else "batch"}
    about |= {"environment": environment(device)}
    for decay in given.decay:
        row = experiments.Experiment(
            given.network,
            tuple(given.lam),
            tuple(given.seeds),
            given.epochs,
            weight_decay=decay,
            per_example=given.per_example,
        )
        learners = [experiments.learner(row, seed, len(training), device) for seed in row.seeds]
        for one in learners:
            one.objective.penalties[0].decay_moves_gates = not given.still_gates
        engine = Engine(learners, training, stacked=device.type == "cuda")
        curves: list[dict[int, float]] = [{} for _ in learners]
        for epoch in filter(lambda epoch: is_snapshot(epoch, row.epochs), engine):
            for one, curve in zip(learners, curves, strict=True):
                curve[epoch] = error_rate(one.averaged, held_out)
        with given.out.open("a") as file:
            for one, curve in zip(learners, curves, strict=True):
                found = {"decay": decay, "seed": one.seed, "units": one.averaged.units_left()}
                found |= {"error": curve[row.epochs], "curve": curve, "seconds": engine.seconds}
                print(json.dumps(found), flush=True)
                file.write(json.dumps({**about, **found}) + "\n")


def table(file: Path) -> str:
    """Means over the seeds of every setting in the file, and the deviation between networks."""
    settings: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in map(json.loads, file.read_text().splitlines()):
        lam, felt = " ".join(map("{:g}".format, one["lam"])), one["moves_gates"]
        key = (one["network"], lam, f"{one['decay']:g}", "all" if felt else "weights")
        settings.setdefault((*key, one.get("sample", "batch")), []).append(one)
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for setting, networks in settings.items():
        units = zip(*(one["units"] for one in networks), strict=True)
        errors = [one["error"] for one in networks]
        deviation = f"{statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
        mean = ["-".join(f"{statistics.mean(each):.1f}" for each in units)]
        mean += [f"{statistics.mean(errors) + 1e-9:.2f}%", deviation]  # ties go up
        lines.append([*setting, str(len(networks)), *mean])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
