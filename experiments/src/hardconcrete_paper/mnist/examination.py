"""Everything that is measured on trained networks, with the test set opened once."""

import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.cost import interleaved
from hardconcrete.demo import answers, error_rate, status
from hardconcrete.demo.data import Images
from hardconcrete_paper.mnist.experiment import NETWORKS, MnistExperiment
from hardconcrete_paper.mnist.experiment import learner as before_training
from hardconcrete_paper.training.driver import Trained
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe
from hardconcrete_paper.training.run_folder import RunFolder

READOUTS = ("paper", "median", "mean", "binary")
TUNING = Recipe(epochs=5)
"""How a compacted network is trained on, to see what that brings."""
LATENCY_BATCH, LATENCY_REPEATS = 64, 50


@dataclass(frozen=True)
class MnistResult:
    """What one seed ended with; operations are counted two per multiply-add, as in the paper.

    Args:
        seed: of the network.
        units: gates that are left, as the paper counts.
        error: of the compacted network on the test set, in percent.
        disagreements: test images to which the compacted and the gated network answer differently.
        expected_flops: under the probabilities of opening, both ends of a weight counted.
        uncoupled_flops: the same as the paper counts it.
        delivered_flops: under the readout.
        dense_flops: of the network without gates.
        seconds: training of all seeds together.
        small_parameters: of the compacted network.
        small_flops: of the compacted network, for one image.
        small_latency: milliseconds on the CPU, 64 images, median.
        dense_latency: the same of the dense network, measured in turn with the small one.
        tuned_error: of the compacted network after five more epochs without gates.
        readouts: error, units and FLOPs under every rule that turns gates into numbers.
        curve: error of the averaged network by epoch, from what was saved while it trained.
    """

    seed: int
    units: tuple[int, ...]
    error: float
    disagreements: int
    expected_flops: float
    uncoupled_flops: float
    delivered_flops: float
    dense_flops: float
    seconds: float
    small_parameters: int
    small_flops: int
    small_latency: float
    dense_latency: float
    tuned_error: float
    readouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    curve: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """From a record."""
        return cls(**{**row, "units": tuple(row["units"])})


def examine(experiment: MnistExperiment, trained: Trained) -> list[MnistResult]:
    """Compact, save, tune and time every network; then open the test set, and test."""
    learners, folder = trained.engine.learners, trained.folder
    small = [_small(learner, folder) for learner in learners]
    tuned = _tuned(learners, small, trained.training)
    dense = [_dense(experiment, learner) for learner in learners]
    times = [_latencies(*pair) for pair in zip(small, dense, strict=True)]
    kept = [list(folder.snapshots(learner.seed)) for learner in learners]
    test = trained.open_test()
    network = NETWORKS[experiment.network]
    results = []
    each = zip(learners, small, tuned, times, kept, strict=True)
    for learner, compacted, further, latency, snapshots in each:
        model = learner.averaged
        now = status(model, 0.0, network.sizes, network.dense_macs)
        gated = isinstance(model, hc.GatedModel)
        alive = (
            model.open_probability()
            if gated
            else {k: torch.ones(n) for k, n in network.sizes.items()}
        )
        counted = hc.count(compacted, torch.zeros(1, 1, 28, 28, device=learner.device))
        predicted, expected = answers(compacted, test), answers(model, test)
        wrong = int((predicted != test.labels).sum())
        results.append(
            MnistResult(
                seed=learner.seed,
                units=now.units,
                error=round(100 * wrong / len(test), 4),
                disagreements=int((predicted != expected).sum()),
                expected_flops=2 * now.expected,
                uncoupled_flops=2 * network.uncoupled(alive),
                delivered_flops=2 * now.delivered,
                dense_flops=2 * network.dense_macs,
                seconds=round(trained.engine.seconds, 2),
                small_parameters=counted.params,
                small_flops=2 * counted.macs,
                small_latency=latency[0],
                dense_latency=latency[1],
                tuned_error=round(error_rate(further, test), 4),
                readouts=dict(_readouts(experiment, model, test)) if gated else {},
                curve=dict(_curve(experiment, learner, snapshots, test)),
            )
        )
    return results


def _small(learner: Learner, folder: RunFolder) -> nn.Module:
    """The compacted network, also written to a file. A network without gates is copied."""
    model: nn.Module = learner.averaged
    if not isinstance(model, hc.GatedModel):
        return copy.deepcopy(model)
    small = hc.compact(model, budget=learner.budget)
    hc.save(folder.small(learner.seed), small)
    return small


def _tuned(
    learners: Sequence[Learner], small: list[nn.Module], training: Images
) -> list[nn.Module]:
    """The small networks after more training, each with its seed, without gates and penalty."""
    students = [
        Learner(learner.name, learner.seed, copy.deepcopy(model), TUNING)
        for learner, model in zip(learners, small, strict=True)
    ]
    engine, console = Engine(students, training, compiled=False), Console(stderr=True)
    quiet = not console.is_terminal
    for _ in track(engine, "after compaction", TUNING.epochs, console=console, disable=quiet):
        pass
    return [student.averaged for student in students]


def _dense(experiment: MnistExperiment, learner: Learner) -> nn.Module:
    """The network before compaction, without gates, to compare latencies with.

    It has trained weights, because LeNet-5 is slower with random ones; but not if it was shrunk.
    """
    model: nn.Module = learner.averaged
    if not isinstance(model, hc.GatedModel):
        return model
    dense = NETWORKS[experiment.network].build()
    if not experiment.shrink:
        dense.load_state_dict(model.model.state_dict())
    return dense


def _latencies(small: nn.Module, dense: nn.Module) -> tuple[float, float]:
    """Milliseconds of the small and of the dense network on the CPU, called in turn."""
    pair = [copy.deepcopy(model).cpu().eval() for model in (small, dense)]
    images = torch.rand(LATENCY_BATCH, 1, 28, 28)
    calls = [lambda model=model: model(images) for model in pair]
    with torch.inference_mode():
        times = interleaved(calls, LATENCY_REPEATS)
    first, second = (round(statistics.median(each), 4) for each in times)
    return first, second


def _readouts(
    experiment: MnistExperiment, model: hc.GatedModel, test: Images
) -> Iterator[tuple[str, dict[str, Any]]]:
    network = NETWORKS[experiment.network]
    for rule in READOUTS:
        other = copy.deepcopy(model)
        other.gates.rule = rule
        now = status(other, 0.0, network.sizes, network.dense_macs)
        error = round(error_rate(other, test), 4)
        yield rule, {"error": error, "units": [*now.units], "flops": 2 * now.delivered}


def _curve(
    experiment: MnistExperiment,
    learner: Learner,
    snapshots: list[tuple[int, dict[str, Tensor]]],
    test: Images,
) -> Iterator[tuple[str, float]]:
    model = copy.deepcopy(learner.averaged)
    for epoch, state in snapshots:
        if experiment.shrink:  # it was larger then
            model = before_training(experiment, learner.seed, 1, learner.device).model
        model.load_state_dict(state)
        yield str(epoch), round(error_rate(model, test), 4)
