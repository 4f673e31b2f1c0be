"""Training an experiment on MNIST, from its first step to the one look at the test set."""

import time
from dataclasses import asdict
from pathlib import Path

import torch

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.paper.datasets import Images, hold_out, load_mnist
from hardconcrete.paper.display import Display, Sweep, dense_macs, status
from hardconcrete.paper.engine import Engine
from hardconcrete.paper.examination import Result, examine
from hardconcrete.paper.experiment import NETWORKS, Experiment, learner
from hardconcrete.paper.learner import Learner
from hardconcrete.paper.records import RunFolder, environment

CHECKPOINT_SECONDS = 15.0
"""Least time between two checkpoints."""


def run(
    experiment: Experiment,
    *,
    out: Path,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    sweep: Sweep | None = None,
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
    place = choose_device(device)
    training = load_mnist("train", data)
    if experiment.validate:
        training, held_out = hold_out(training)
    folder = RunFolder(out / experiment.name)
    folder.begin(experiment.settings(), resume=resume)
    record = folder.read()
    if "results" in record:  # the test set was read for it; it is not read again
        return [Result.of(row) for row in record["results"]]
    started = time.perf_counter()
    learners = [learner(experiment, seed, len(training), place) for seed in experiment.seeds]
    seconds = _train(experiment, learners, training, folder, sweep)
    finished = examine(
        experiment,
        learners,
        training,
        lambda: held_out if experiment.validate else load_mnist("test", data),
        folder,
        seconds,
    )
    folder.write(
        {
            **record,
            "environment": environment(place),
            "tested_on": "5,000 held-out training images" if experiment.validate else "test set",
            "seconds_in_all": round(time.perf_counter() - started, 1),
            "results": [asdict(result) for result in finished],
        }
    )
    return finished


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


def _train(
    experiment: Experiment,
    learners: list[Learner],
    training: Images,
    folder: RunFolder,
    sweep: Sweep | None,
) -> float:
    """Train to the end, from the last checkpoint if there is one; the seconds that took."""
    network = NETWORKS[experiment.network]
    engine = Engine(learners, training, stacked=learners[0].device.type == "cuda")
    _continue(folder, engine)
    saved = time.perf_counter()
    names, dense = [each.name for each in learners], dense_macs(network.macs, network.sizes)
    with Display(names, experiment.epochs, dense, sweep) as display:
        for epoch in engine:
            models = [each.averaged for each in learners]
            statuses = [
                status(model, loss, network.macs, network.sizes)
                for model, loss in zip(models, engine.losses, strict=True)
            ]
            display.update(epoch, statuses)
            for each, model, now in zip(learners, models, statuses, strict=True):
                line = {"epoch": epoch, "seed": each.seed, **asdict(now)}
                if isinstance(model, hc.GatedModel):
                    line["uncoupled"] = network.uncoupled(model.open_probability())
                folder.log(line)
                if is_snapshot(epoch, experiment.epochs):
                    folder.snapshot(epoch, each.seed, model.state_dict())
            if epoch in (1, experiment.epochs) or time.perf_counter() - saved > CHECKPOINT_SECONDS:
                _save(folder, engine)
                saved = time.perf_counter()
    return engine.seconds


def is_snapshot(epoch: int, epochs: int) -> bool:
    """Whether the averaged network of this epoch is kept, for curves that are drawn afterwards.

    Example:
        >>> [epoch for epoch in range(1, 31) if is_snapshot(epoch, 25)]
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 25, 30]
    """
    return epoch <= 10 or epoch % 10 == 0 or epoch == epochs


def _continue(folder: RunFolder, engine: Engine) -> None:
    """Go back to the last checkpoint, if there is one."""
    found = folder.load()
    if found is None:
        return
    state, engine.done, engine.seconds = found
    for each in engine.learners:
        prefix = f"seed{each.seed}."
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        each.restore(own)
        each.taken = engine.done * engine.steps


def _save(folder: RunFolder, engine: Engine) -> None:
    tensors = {
        f"seed{each.seed}.{name}": tensor
        for each in engine.learners
        for name, tensor in each.state().items()
    }
    folder.save(tensors, engine.done, engine.seconds)
