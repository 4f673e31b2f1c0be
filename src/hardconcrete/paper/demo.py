"""The library at work in a minute: a network learns which of its own units to drop.

A dense and a gated MLP are trained side by side on handwritten digits. The settings were chosen on
held-out training images: a gate learning rate twenty times that of the weights makes in ten epochs
visible what the paper's settings do in two hundred.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import hardconcrete as hc
from hardconcrete.errors import DataError
from hardconcrete.paper.datasets import Images, load_digits, load_mnist
from hardconcrete.paper.display import Display, Status, status
from hardconcrete.paper.engine import Engine, error_rate
from hardconcrete.paper.learner import Learner, Recipe
from hardconcrete.paper.models import MLP
from hardconcrete.paper.records import environment
from hardconcrete.report.plots import (
    check_plotting,
    gate_histograms,
    kept_inputs,
    units_over_time,
)


@dataclass(frozen=True)
class Setting:
    """What the demo does with a data set.

    Args:
        side: width and height of its images.
        hidden: sizes of the hidden layers.
        lam: lambda times the number of examples.
        recipe: how both networks are trained.
    """

    side: int
    hidden: tuple[int, int]
    lam: float
    recipe: Recipe

    @property
    def sizes(self) -> dict[str, int]:
        """Units by group."""
        return dict(zip(("fc1:in", "fc2:in", "fc3:in"), (self.side**2, *self.hidden), strict=True))


SETTINGS = {
    "mnist": Setting(28, (300, 100), 0.5, Recipe(epochs=12, gate_lr=2e-2, averaging=0.99)),
    "digits": Setting(
        8, (100, 50), 0.1, Recipe(epochs=40, batch_size=20, gate_lr=2e-2, averaging=0.99)
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How a network ended: test error in percent, units left, multiply-adds delivered, expected."""

    name: str
    error: float
    units: tuple[int, ...]
    macs: float
    expected: float


@dataclass(frozen=True)
class Demo:
    """What the demo found and drew."""

    dataset: str
    outcomes: tuple[Outcome, Outcome]
    plan: str
    report: hc.Report
    files: tuple[Path, ...]


def find_data(data: Path | None) -> tuple[Images, Images, str]:
    """Training and test images, and which they are: MNIST when it can be had, else the digits."""
    try:
        train, test = load_mnist("train", data), load_mnist("test", data)
        return train, test, "MNIST, 60,000 handwritten digits of 28 x 28"
    except DataError as error:
        if data is not None:
            raise
        first, *more = str(error).splitlines()
        reason = " ".join([first, *more[:1]]) if "is corrupt" in first else first  # what to delete
        reason = reason.removesuffix("; tried") + "; --data DIR names a folder that has it"
        title = "scikit-learn's 1,797 handwritten digits of 8 x 8, because MNIST is out of reach"
        return load_digits("train"), load_digits("test"), f"{title} ({reason})"


def demo(
    train: Images,
    test: Images,
    out: Path,
    seed: int = 0,
    *,
    lam: float | None = None,
    macs: float | None = None,
    params: float | None = None,
) -> Demo:
    """Train both networks, compare them, and draw what the gates did into ``out``.

    Args:
        train: what they are trained on.
        test: what they are tested on.
        out: folder for pictures, record and small model.
        seed: of both networks.
        lam: lambda times the number of examples, if not the setting's.
        macs: instead of a lambda, the part of the dense multiply-adds to keep.
        params: likewise of the parameters.

    Example:
        ``demo(*find_data(None)[:2], Path("report"))`` is what ``hardconcrete demo`` runs.
    """
    start, setting = time.perf_counter(), SETTINGS[train.name]
    check_plotting(out)
    torch.manual_seed(seed)
    dense = Learner("dense", seed, MLP(setting.side**2, setting.hidden), setting.recipe)
    model = MLP(setting.side**2, setting.hidden)
    gated = hc.attach_gates(model, train.images[:1].float(), sites=[*setting.sizes], droprate=0.3)
    lam = setting.lam if lam is None else lam
    limits = {"macs": macs, "params": params}
    steps = setting.recipe.epochs * (len(train) // setting.recipe.batch_size)
    penalty: hc.Budget | hc.L0Penalty = (
        hc.L0Penalty(gated, lam / len(train))
        if macs is params is None
        else hc.Budget(gated, macs=macs, params=params, steps=steps, by="gates")
    )
    learners = [dense, Learner("gated", seed, gated, setting.recipe, penalty)]
    history = _train(learners, train, setting)
    first, second = (
        Outcome(
            learner.name, error_rate(learner.averaged, test), now.units, now.delivered, now.expected
        )
        for learner, now in zip(learners, history[-1], strict=True)
    )
    gated = learners[1].averaged
    files = _draw(gated, history, setting, out)
    small = hc.compact(gated, budget=learners[1].budget)
    hc.save(out / "small.safetensors", small)
    report = hc.measure(gated, small, test.images[:64].float())
    record = {
        "dataset": train.name,
        "seed": seed,
        "recipe": asdict(setting.recipe),
        "lam_times_examples": lam if macs is params is None else None,
        "budget": limits,
        "dense": asdict(first),
        "gated": asdict(second),
        "small_error": error_rate(small, test),
        "measured": report.to_dict(),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(learners[0].device),
    }
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    written = (*files, out / "small.safetensors", out / "record.json")
    return Demo(train.name, (first, second), str(hc.CompactionPlan.of(small)), report, written)


def _train(learners: list[Learner], train: Images, setting: Setting) -> list[list[Status]]:
    """Every network's status before the first and after each epoch."""
    dense = hc.count(learners[0].model, train.images[:1].float()).macs
    engine = Engine(learners, train)
    everything = Status(float("nan"), tuple(setting.sizes.values()), dense, dense)
    history = [[everything] * len(learners)]
    with Display([learner.name for learner in learners], engine.epochs, dense) as display:
        for epoch in engine:
            history.append(
                [
                    status(learner.averaged, loss, setting.sizes, dense)
                    for learner, loss in zip(learners, engine.losses, strict=True)
                ]
            )
            display.update(epoch, history[-1])
    return history


def _draw(
    gated: hc.GatedModel, history: list[list[Status]], setting: Setting, out: Path
) -> tuple[Path, ...]:
    counts = {
        name: [row[1].units[index] for row in history] for index, name in enumerate(setting.sizes)
    }
    pixels = gated.gate_values()["fc1:in"]
    return (
        *kept_inputs(pixels, (setting.side, setting.side), out),
        *gate_histograms(gated.open_probability(), out),
        *units_over_time(counts, out),
    )
