"""The paper's rows on MNIST: train, count the units that are left, test once at the end."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.paper.datasets import Images, hold_out, load_mnist
from hardconcrete.paper.display import Display, Macs, dense_macs, status
from hardconcrete.paper.engine import Engine, Learner, Recipe, error_rate
from hardconcrete.paper.flops import lenet5_macs, mlp_macs
from hardconcrete.paper.models import MLP, LeNet5
from hardconcrete.paper.records import RunFolder, environment

CHECKPOINT_SECONDS = 15.0
"""Least time between two checkpoints."""


@dataclass(frozen=True)
class Network:
    """A network of table 1: where its gates sit and what the paper found."""

    build: Callable[[], nn.Module]
    droprate: Mapping[str, float]
    sizes: Mapping[str, int]
    macs: Macs
    rows: Mapping[tuple[float, ...], tuple[str, str, float]]
    """Title, units left and error in percent, by lambda times N."""


NETWORKS = {
    "mlp": Network(
        build=MLP,
        droprate={"fc1:in": 0.2, "fc2:in": 0.5, "fc3:in": 0.5},
        sizes={"fc1:in": 784, "fc2:in": 300, "fc3:in": 100},
        macs=mlp_macs,
        rows={
            (0.1,): ("lambda = 0.1/N", "219-214-100", 1.4),
            (0.1, 0.5, 5.0): ("lambda sep.", "266-88-33", 1.8),
        },
    ),
    "lenet5": Network(
        build=LeNet5,
        droprate={"conv1:out": 0.5, "conv2:out": 0.5, "fc1:in": 0.5, "fc2:in": 0.5},
        sizes={"conv1:out": 20, "conv2:out": 50, "fc1:in": 800, "fc2:in": 500},
        macs=lenet5_macs,
        rows={
            (0.1,): ("lambda = 0.1/N", "20-25-45-462", 0.9),
            (10.0, 0.5, 0.1, 10.0): ("lambda sep.", "9-18-65-25", 1.0),
        },
    ),
}


@dataclass(frozen=True)
class Experiment:
    """A row of table 1, or any other setting of its lambdas.

    Args:
        network: ``"mlp"`` or ``"lenet5"``.
        lam: lambda times N, one for all groups or one for each.
        seeds: networks that are trained side by side.
        epochs: passes over the training images.
        validate: hold 5,000 training images out, test on those, and never open the test set.
    """

    network: str
    lam: tuple[float, ...] = (0.1,)
    seeds: tuple[int, ...] = (0,)
    epochs: int = 200
    validate: bool = False

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ArgumentError(f"network {self.network!r} is not known: {', '.join(NETWORKS)}")
        groups = list(NETWORKS[self.network].sizes)
        if len(self.lam) not in (1, len(groups)):
            raise ArgumentError(
                f"--lam takes one number or one for each of {', '.join(groups)}, "
                f"not {len(self.lam)}"
            )
        for lam in self.lam:
            if not 0 <= lam < math.inf:
                raise ArgumentError(f"--lam {lam} must not be negative or infinite")
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ArgumentError(f"--seeds {self.seeds} must name at least one seed, each once")
        for seed in self.seeds:
            if not 0 <= seed < 2**31:
                raise ArgumentError(f"--seeds {seed} must lie between 0 and 2^31")
        if self.epochs < 1:
            raise ArgumentError(f"--epochs {self.epochs} must be at least 1")

    @property
    def name(self) -> str:
        """A name for its folder."""
        parts = [self.network, *(f"{lam:g}" for lam in self.lam), *["validate"] * self.validate]
        return "-".join(parts)


@dataclass(frozen=True)
class Result:
    """What one seed ended with; operations are counted two per multiply-add, as in the paper.

    The error is that of the compacted model, whose parameters and FLOPs are counted, too.
    """

    seed: int
    units: tuple[int, ...]
    error: float
    expected_flops: float
    delivered_flops: float
    dense_flops: float
    seconds: float
    small_parameters: int
    small_flops: int


def run(
    experiment: Experiment,
    *,
    out: Path,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
) -> list[Result]:
    """Train all seeds of an experiment; its files lie under ``out``.

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
    folder.begin(_as_json(experiment), resume=resume)
    record = folder.read()
    if "results" in record:  # the test set was read for it; it is not read again
        return [Result(**{**row, "units": tuple(row["units"])}) for row in record["results"]]
    started = time.perf_counter()
    learners = [_learner(experiment, seed, len(training), place) for seed in experiment.seeds]
    seconds = _train(experiment, learners, training, folder)
    tested = held_out if experiment.validate else load_mnist("test", data)
    results = [_result(experiment, learner, tested, seconds, folder) for learner in learners]
    folder.write(
        {
            **record,
            "environment": environment(place),
            "tested_on": "5,000 held-out training images" if experiment.validate else "test set",
            "seconds_in_all": round(time.perf_counter() - started, 1),
            "results": [asdict(result) for result in results],
        }
    )
    return results


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


def gated_network(
    network: Network, lam: Sequence[float], examples: int, device: torch.device
) -> tuple[hc.GatedModel, hc.L0Penalty]:
    """A network with the paper's gates, and its penalty; lam is lambda times N."""
    model = network.build().to(device)
    names = list(network.droprate)
    images = torch.zeros(2, 1, 28, 28, device=device)
    gated = hc.attach_gates(model, images, sites=names, droprate=network.droprate)
    each = [*lam] * len(names) if len(lam) == 1 else lam
    rates = {name: value / examples for name, value in zip(names, each, strict=True)}
    return gated, hc.L0Penalty(gated, rates)


def _learner(experiment: Experiment, seed: int, examples: int, device: torch.device) -> Learner:
    torch.manual_seed(seed)
    network = NETWORKS[experiment.network]
    gated, penalty = gated_network(network, experiment.lam, examples, device)
    return Learner(f"seed {seed}", seed, gated, Recipe(epochs=experiment.epochs), penalty)


def _train(
    experiment: Experiment, learners: list[Learner], training: Images, folder: RunFolder
) -> float:
    """Train to the end, from the last checkpoint if there is one; the seconds that took."""
    network = NETWORKS[experiment.network]
    engine = Engine(learners, training)
    found = folder.load()
    if found is not None:
        state, engine.done, engine.seconds = found
        for learner in learners:
            prefix = f"seed{learner.seed}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            learner.restore(own)
    saved = time.perf_counter()
    names, dense = [learner.name for learner in learners], dense_macs(network.macs, network.sizes)
    with Display(names, experiment.epochs, dense) as display:
        for epoch in engine:
            statuses = [
                status(learner.averaged, loss, network.macs, network.sizes)
                for learner, loss in zip(learners, engine.losses, strict=True)
            ]
            display.update(epoch, statuses)
            for learner, now in zip(learners, statuses, strict=True):
                folder.log({"epoch": epoch, "seed": learner.seed, **asdict(now)})
            if epoch in (1, experiment.epochs) or time.perf_counter() - saved > CHECKPOINT_SECONDS:
                _save(folder, engine)
                saved = time.perf_counter()
    return engine.seconds


def _save(folder: RunFolder, engine: Engine) -> None:
    tensors = {
        f"seed{learner.seed}.{name}": tensor
        for learner in engine.learners
        for name, tensor in learner.state().items()
    }
    folder.save(tensors, engine.done, engine.seconds)


def _result(
    experiment: Experiment, learner: Learner, tested: Images, seconds: float, folder: RunFolder
) -> Result:
    """Compact, save and test what a seed ended with."""
    network = NETWORKS[experiment.network]
    now = status(learner.averaged, 0.0, network.macs, network.sizes)
    small = hc.compact(learner.averaged)
    hc.save(folder.small(learner.seed), small)
    counted = hc.count(small, torch.zeros(1, 1, 28, 28, device=learner.device))
    return Result(
        seed=learner.seed,
        units=now.units,
        error=round(error_rate(small, tested), 4),
        expected_flops=2 * now.expected,
        delivered_flops=2 * now.delivered,
        dense_flops=2 * dense_macs(network.macs, network.sizes),
        seconds=round(seconds, 2),
        small_parameters=counted.params,
        small_flops=2 * counted.macs,
    )


def _as_json(experiment: Experiment) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(experiment).items()}
