"""The library at work in a minute: a network learns which of its units to drop.

A dense and a gated MLP are trained side by side on handwritten digits. The settings were chosen on
held-out training images. The gates learn twenty times as fast as the weights, so that ten epochs
show what the paper's settings do in two hundred.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hardconcrete as hc
from hardconcrete.demo.data import Images, load_digits, load_mnist
from hardconcrete.demo.display import Display, Status, status
from hardconcrete.demo.evaluation import error_rate
from hardconcrete.demo.network import MLP
from hardconcrete.demo.training import Setting, Trainee
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete.files import replace_file
from hardconcrete.report import (
    check_plotting,
    environment,
    gate_histograms,
    kept_inputs,
    units_over_time,
)
from hardconcrete.sparsifiers import method_of

SETTINGS = {
    "mnist": Setting(28, (300, 100), lam=0.5, epochs=12),
    "digits": Setting(8, (100, 50), lam=0.1, epochs=40, batch_size=20),
}
"""By data set."""


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
    """The results of the demo and its files."""

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


def run_demo(
    train: Images,
    test: Images,
    out: Path,
    seed: int = 0,
    *,
    lam: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    method: str = "hard-concrete",
) -> Demo:
    """Train both networks, compare them, and write plots of the gates into ``out``.

    Args:
        train: what they are trained on.
        test: what they are tested on.
        out: folder for pictures, record and small model.
        seed: of both networks.
        lam: lambda times the number of examples, if not the setting's.
        macs: instead of a lambda, the fraction of the dense multiply-adds to keep.
        params: the fraction of the dense parameters to keep.
        method: of the gates, by its name.

    Example:
        ``run_demo(*find_data(None)[:2], Path("report"))`` is what ``hardconcrete demo`` runs.
    """
    start, setting = time.perf_counter(), SETTINGS[train.name]
    _refuse_lambda(lam, method)
    check_plotting(out)
    torch.manual_seed(seed)
    lam = setting.lam if lam is None else lam
    limits = {"macs": macs, "params": params}
    trainees = _trainees(train, setting, lam, limits, method)
    history = _train(trainees, train, setting)
    first, second = (
        _outcome(trainee, now, test) for trainee, now in zip(trainees, history[-1], strict=True)
    )
    gated: Any = trainees[1].averaged
    files = _draw(gated, history, setting, out)
    small = hc.compact(gated, budget=trainees[1].budget)
    hc.save(out / "small.safetensors", small)
    report = hc.measure(gated, small, test.images[:64].float())
    settings = {
        "dataset": train.name,
        "method": method,
        "seed": seed,
        "setting": asdict(setting),
        "lam_times_examples": lam if macs is params is None else None,
        "budget": limits,
    }
    results = {
        "dense": asdict(first),
        "gated": asdict(second),
        "small_error": error_rate(small, test),
        "measured": report.to_dict(),
    }
    _write_record({**settings, **results}, start, out)
    written = (*files, out / "small.safetensors", out / "record.json")
    return Demo(train.name, (first, second), str(hc.CompactionPlan.of(small)), report, written)


def _write_record(record: dict[str, Any], start: float, out: Path) -> None:
    """Write settings and results, the time since the start, and the environment."""
    seconds = round(time.perf_counter() - start, 1)
    record |= {"seconds": seconds, "environment": environment(torch.device("cpu"))}
    text = json.dumps(record, indent=2) + "\n"
    replace_file(out / "record.json", lambda temporary: temporary.write_text(text))


def _outcome(trainee: Trainee, now: Status, test: Images) -> Outcome:
    error = error_rate(trainee.averaged, test)
    return Outcome(trainee.name, error, now.units, now.delivered, now.expected)


def _refuse_lambda(lam: float | None, method: str) -> None:
    if lam is not None and method_of(method).has_penalty:
        raise ArgumentError(f"{method} has a penalty of its own, without a lambda: leave it out")


def _trainees(
    train: Images, setting: Setting, lam: float, limits: dict[str, float | None], method: str
) -> tuple[Trainee, Trainee]:
    """A dense network, and one with a gate on every unit."""
    dense, model = (MLP(setting.side**2, setting.hidden) for _ in range(2))
    family = method_of(method)
    gated = hc.attach_gates(
        model,
        train.images[:1].float(),
        sites=[*setting.sizes],
        droprate=None if family.has_penalty else 0.3,
        method=family,
    )
    trainee = Trainee("gated", gated, setting)
    steps = setting.epochs * (len(train) // setting.batch_size)
    if any(limit is not None for limit in limits.values()):
        chosen: Any = limits
        trainee.penalty = hc.Budget(gated, steps=steps, by="gates", **chosen)
    elif family.has_penalty:
        trainee.penalty = hc.MethodPenalty(
            gated, len(train), optimizer=trainee.optimizer, warm_up=steps // 10
        )
    else:
        trainee.penalty = hc.L0Penalty(gated, lam / len(train))
    return Trainee("dense", dense, setting), trainee


def _train(trainees: Sequence[Trainee], train: Images, setting: Setting) -> list[list[Status]]:
    """Every network's status before the first and after each epoch."""
    dense = hc.count(trainees[0].model, train.images[:1].float()).macs
    everything = Status(float("nan"), tuple(setting.sizes.values()), dense, dense)
    history = [[everything] * len(trainees)]
    with Display([trainee.name for trainee in trainees], setting.epochs, dense) as display:
        for epoch in range(1, setting.epochs + 1):
            losses = [trainee.train_epoch(train) for trainee in trainees]
            now = [
                status(trainee.averaged, loss, setting.sizes, dense)
                for trainee, loss in zip(trainees, losses, strict=True)
            ]
            history.append(now)
            display.show(epoch, now)
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
