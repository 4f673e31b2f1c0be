"""Claim: with shrinking, LeNet-5's training on a CPU saves 70% of what the MACs promise.

LeNet-5 with separate lambdas, the row of table 1, for all its epochs, with units removed as their
gates shut. A dense network and one with gates and without shrinking take a step now and
then, in turn with it: what a step of theirs takes does not depend on what they have learnt. An
epoch is its number of steps times their median in it, for all three, since on a shared machine some
steps take long for reasons of others.

    python experiments/benchmarks/shrink_training.py [--epochs 200] [--out FILE]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hardconcrete.demo.data import load_mnist
from hardconcrete.report import BLUE, GREEN, VERMILION, environment, save_figure
from hardconcrete_paper.mnist.experiment import NETWORKS, MnistExperiment, learner
from hardconcrete_paper.training.engine import Engine

LAM = (10.0, 0.5, 0.1, 10.0)
EVERY = 60
"""Steps between two timings of the other networks. Each then takes two steps; the second counts."""


def main() -> None:
    """Train, and print, and perhaps write and draw, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--shrink", type=int, default=2, help="epochs that a unit was shut for")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    data, cpu = load_mnist("train", arguments.data), torch.device("cpu")
    about: Any = {"epochs": arguments.epochs}
    experiments = {
        "dense": MnistExperiment("lenet5", (), method="dense", **about),
        "gated": MnistExperiment("lenet5", LAM, **about),
        "shrinking": MnistExperiment("lenet5", LAM, shrink=arguments.shrink, **about),
    }
    engines = {
        name: Engine([learner(each, 0, len(data), cpu)], data) for name, each in experiments.items()
    }
    epochs: list[dict[str, Any]] = []
    for epoch in range(arguments.epochs):
        epochs.append(_epoch(epoch, engines))
        print(epochs[-1], flush=True)
        if arguments.out and (epoch % 10 == 9 or epoch == arguments.epochs - 1):
            record = {
                "environment": environment(cpu),
                "settings": experiments["shrinking"].settings(),
                **summary(epochs),
                "epochs": epochs,
            }
            arguments.out.write_text(json.dumps(record) + "\n")
            draw(epochs, arguments.out)
    print(json.dumps(summary(epochs), indent=2))


def _epoch(epoch: int, engines: dict[str, Engine]) -> dict[str, Any]:
    """Train the shrinking network for an epoch; seconds of all three."""
    shrinking = engines["shrinking"]
    others = {name: engine for name, engine in engines.items() if engine is not shrinking}
    for engine in engines.values():
        for stack in engine.stacks:
            stack.begin_epoch(epoch)
    taken = {name: list[float]() for name in engines}
    for step in range(shrinking.steps):
        taken["shrinking"].append(_seconds(shrinking))
        if step % EVERY == EVERY // 2:
            for name, engine in others.items():
                _seconds(engine)
                taken[name].append(_seconds(engine))
    (network,) = shrinking.learners
    shrinking.done = epoch + 1
    macs = network.model.ledger.cost(torch.ones(network.gates))[1].item()  # type: ignore[union-attr, operator]
    start = time.perf_counter()
    if shrinking.done < shrinking.epochs and network.shrink():
        shrinking.build()
    return {
        "epoch": epoch + 1,
        "macs": round(macs / NETWORKS["lenet5"].dense_macs, 4),
        "to_shrink": round(time.perf_counter() - start, 3),
        **{k: round(shrinking.steps * statistics.median(v), 3) for k, v in taken.items()},
        "units": network.model.units_left(),  # type: ignore[union-attr, operator]
    }


def _seconds(engine: Engine) -> float:
    start = time.perf_counter()
    engine._step()
    return time.perf_counter() - start


def against_dense(epochs: list[dict[str, Any]], name: str) -> list[float]:
    """Time of every epoch, in epochs of the dense network; with what shrinking took."""
    extra = "to_shrink" if name == "shrinking" else None
    return [(each[name] + each.get(extra, 0.0)) / each["dense"] for each in epochs]


def summary(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole training, and what is saved of what was promised since the first shrink."""
    whole = {
        name: round(statistics.mean(against_dense(epochs, name)), 4)
        for name in ("gated", "shrinking")
    }
    later = [each for each in epochs if each["macs"] < 1]
    found: dict[str, Any] = {"whole training, dense = 1": whole}
    if later:
        saved = 1 - statistics.mean(against_dense(later, "shrinking"))
        promised = 1 - statistics.mean(each["macs"] for each in later)
        found |= {
            "first shrink after epoch": later[0]["epoch"] - 1,
            "promised": round(promised, 4),
            "saved": round(saved, 4),
            "saved of the promised": round(saved / promised, 4),
        }
    return found


def draw(epochs: list[dict[str, Any]], out: Path) -> None:
    """Time of an epoch."""

    def on(figure: Any) -> None:
        axes = figure.subplots()
        count = [each["epoch"] for each in epochs]
        for name, colour in (("dense", BLUE), ("gated", VERMILION), ("shrinking", GREEN)):
            axes.plot(count, against_dense(epochs, name), color=colour, label=name)
        axes.plot(count, [each["macs"] for each in epochs], "k:", label="MACs left")
        axes.set(xlabel="epoch", ylabel="time of an epoch (dense = 1)", ylim=(0, 1.5))
        axes.legend()

    save_figure(on, out.parent, out.stem, (6, 4))


if __name__ == "__main__":
    main()
