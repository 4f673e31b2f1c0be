"""Training an experiment on MNIST, from its first step to the one look at the test set."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.paper.datasets import Images, find_mnist, hold_out, load_mnist
from hardconcrete.paper.display import Sweep
from hardconcrete.paper.engine import Engine
from hardconcrete.paper.examination import TUNING, Result, examine
from hardconcrete.paper.experiment import EPOCHS, NETWORKS, Experiment, learner
from hardconcrete.paper.records import RunFolder, environment
from hardconcrete.paper.stack import start_compilers
from hardconcrete.paper.training import forecast, train


def run(
    experiment: Experiment,
    *,
    out: Path,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    sweep: Sweep | None = None,
    say: Callable[[str], object] = print,
) -> list[Result]:
    """Train all seeds of an experiment; its files lie under ``out``.

    Nothing but training images are seen until all seeds are trained. Then the test set is opened,
    once, and everything that is ever said about it is computed and written down.

    Example:
        ``run(Experiment("mlp", (0.1,), seeds=(0, 1, 2)), out=Path("runs"))`` trains the first L0
        row of table 1. An impossible setting is refused first:

        >>> try:
        ...     Experiment("mlp", lam=(0.1, 0.5))
        ... except hc.HardConcreteError as error:
        ...     print(error)
        --lam takes one number or one for each of fc1:in, fc2:in, fc3:in, not 2
    """
    folder = RunFolder(out / experiment.name)
    finished = results_in(folder, experiment, resume)
    if finished is not None:  # the test set was read for it; it is not read again
        return finished
    place = choose_device(device)
    start_compilers(place)
    training = load_mnist("train", data)
    if experiment.validate:
        training, held_out = hold_out(training)
    else:
        find_mnist("test", data)
    started = time.perf_counter()
    learners = [learner(experiment, seed, len(training), place) for seed in experiment.seeds]
    folder.begin(experiment.settings(), resume=resume)  # after all that can be refused
    folder.note_environment(environment(place))

    def open_test() -> Images:
        if experiment.validate:
            return held_out
        folder.note_opening()
        return load_mnist("test", data)

    network = NETWORKS[experiment.network]
    alone = experiment.method == "budget" or experiment.shrink
    stacked = place.type == "cuda" and not alone
    engine = Engine(learners, training, stacked=stacked)
    for told in (forecast(learners[0], engine.steps), _advice(experiment, out)):
        if told:
            say(f"note: {told}")

    def uncoupled(model: nn.Module) -> dict[str, Any]:
        if not isinstance(model, hc.GatedModel):
            return {}
        return {"uncoupled": network.uncoupled(model.open_probability())}

    train(engine, folder, network.sizes, network.dense_macs, facts=uncoupled, sweep=sweep)
    say(f"compacting; then {TUNING.epochs} epochs more of each small network, timing and testing")
    finished = examine(experiment, learners, training, open_test, folder, engine.seconds)
    folder.write(
        {
            **folder.read(),
            "tested_on": "5,000 held-out training images" if experiment.validate else "test set",
            "seconds_in_all": round(time.perf_counter() - started, 1),
            "results": [asdict(result) for result in finished],
        }
    )
    return finished


def _advice(experiment: Experiment, out: Path) -> str:
    """Where a setting is one's own and would be tried on the test set: how to choose instead."""
    published = {(), *NETWORKS[experiment.network].rows}  # dense networks have no lambdas
    own = experiment.method == "budget" or experiment.lam not in published
    own |= bool(experiment.weight_decay or experiment.shrink or experiment.per_example)
    own |= experiment.epochs != EPOCHS
    if experiment.validate or not own:
        return ""
    folders = map(RunFolder, sorted(out.glob(f"{experiment.network}-*")))
    before = [folder.path.name for folder in folders if folder.has_been_tested()]
    seen = f" It has been opened for {', '.join(before)}." if before else ""
    return (
        "this setting is not the paper's, and its error will be that on the test set."
        f"{seen} To choose between settings, call each with --validate, then the chosen one once"
    )


def results_in(
    folder: RunFolder, experiment: Experiment, resume: bool = True
) -> list[Result] | None:
    """What a finished run ended with; None if there is none, or it is not finished."""
    if not folder.record.exists():
        return None
    folder.begin(experiment.settings(), resume=resume)
    record = folder.read()
    return [Result.of(row) for row in record["results"]] if "results" in record else None


def choose_device(device: str) -> torch.device:
    """The device of a name, ``"auto"`` being a GPU where there is one.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.zeros((), device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"--device {device}: {str(error).splitlines()[0][:200]}") from error
    if place.type not in ("cpu", "cuda"):
        raise ArgumentError(f"--device {device}: the experiments run on cpu and cuda")
    return place
