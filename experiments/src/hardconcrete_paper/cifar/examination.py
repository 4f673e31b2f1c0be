"""The results of a trained network on CIFAR: compacted, tested and timed."""

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.demo import error_rate
from hardconcrete.demo.data import Images
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete_paper.cifar.experiment import ROUND_TO, CifarExperiment, cifar_network
from hardconcrete_paper.training.driver import Trained
from hardconcrete_paper.training.latencies import latencies
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.run_folder import RunFolder

RECALIBRATION_BATCHES = 100
"""Batches of training images for the batch norms of the averaged network."""
RECALIBRATION_BATCHES_PER_POINT = 20
"""The same, for each point of a curve."""


@dataclass(frozen=True)
class CifarResult:
    """The result of a run; errors in percent.

    Args:
        error: of the compacted network with averaged weights and re-estimated batch norms.
        raw_error: of the network after the last step, without averaging, under the readout.
        units: units of each gated group in the compacted network.
        macs: multiply-adds of the compacted network, for one image, and of the dense one.
        params: parameters, likewise.
        expected_macs: under the probabilities of opening.
        seconds: of training, and of compiling again after a shrink.
        seconds_to_build: to compile and capture, before the first epoch.
        seconds_in_all: from reading the data to the last epoch, checkpoints included; None if
            the run was continued.
        images_per_second: of training, over all epochs.
        peak_memory: most bytes that training had on the GPU; None on a CPU.
        latency: milliseconds of the dense and of the compacted network, by device and batch.
        curve: test error of the averaged network by epoch, from snapshots with re-estimated batch
            norms.
        training_curve: its error on 10,000 training images, likewise.
    """

    error: float
    raw_error: float
    units: tuple[int, ...]
    macs: tuple[int, int]
    params: tuple[int, int]
    expected_macs: float
    seconds: float
    seconds_to_build: float
    images_per_second: float
    peak_memory: int | None
    latency: dict[str, tuple[float, float]]
    curve: dict[str, float]
    training_curve: dict[str, float]
    seconds_in_all: float | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """From a record."""
        pairs = {key: tuple(row[key]) for key in ("units", "macs", "params")}
        latency = {key: tuple(pair) for key, pair in row["latency"].items()}
        return cls(**{**row, **pairs, "latency": latency})


def read_run(folder: RunFolder) -> tuple[CifarExperiment, CifarResult | None]:
    """The experiment of a run, and its result if it is finished."""
    record = folder.read()
    try:
        result = CifarResult.of(record["result"]) if "result" in record else None
        return CifarExperiment.of(record["settings"]), result
    except (AttributeError, KeyError, TypeError, ArgumentError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise DataError(
            f"{folder.record} is no record of this version's `hardconcrete-paper wrn`: {problem}; "
            "move its folder away"
        ) from error


def examine(experiment: CifarExperiment, trained: Trained) -> Iterator[CifarResult]:
    """Estimate batch norms, compact and save; then open the test set, and test.

    Yields errors and counts first, then the result with latencies, then with curves. Parts that
    were recorded earlier are not measured again.
    """
    in_all = None if trained.continued else round(time.perf_counter() - trained.began, 1)
    _, result = read_run(trained.folder)
    (learner,) = trained.engine.learners
    place, averaged = learner.device, copy.deepcopy(learner.averaged)
    prepare: Any = trained.prepare
    rows = torch.arange(RECALIBRATION_BATCHES * learner.recipe.batch_size) % len(trained.training)
    batches = [prepare(trained.training.images[part].to(place)) for part in rows.split(128)]
    hc.recalibrate(averaged, batches)
    small, units = _compacted(experiment, learner, averaged, batches)
    if small is not averaged:
        hc.save(trained.folder.small(experiment.seed), small)
    plain, few, test = prepare.eval(), trained.training.take(slice(10_000)), trained.open_test()
    if result is None:
        image = torch.zeros(1, 3, 32, 32)
        compacted, dense = hc.count(small, image.to(place)), hc.count(experiment.build(), image)
        gated = isinstance(averaged, hc.GatedModel)
        engine = trained.engine
        seen = engine.epochs * engine.steps * learner.recipe.batch_size
        result = CifarResult(
            error=round(error_rate(small, test, prepare=plain), 4),
            raw_error=round(error_rate(learner.model, test, prepare=plain), 4),
            units=units,
            macs=(compacted.macs, dense.macs),
            params=(compacted.params, dense.params),
            expected_macs=averaged.expected("macs").item() if gated else dense.macs,
            seconds=round(engine.seconds, 2),
            seconds_to_build=round(trained.seconds_to_build, 1),
            seconds_in_all=in_all,
            images_per_second=round(seen / engine.seconds, 1),
            peak_memory=trained.peak_memory,
            latency={},
            curve={},
            training_curve={},
        )
        yield result
    if not result.latency:
        result = replace(result, latency=latencies(experiment.build(), small, place))
        yield result
    states = trained.folder.snapshots(experiment.seed)
    curve, training_curve = _curves(
        experiment, learner, states, (test, few), plain, batches[:RECALIBRATION_BATCHES_PER_POINT]
    )
    yield replace(result, curve=curve, training_curve=training_curve)


def _compacted(
    experiment: CifarExperiment, learner: Learner, averaged: Any, batches: Sequence[Tensor]
) -> tuple[nn.Module, tuple[int, ...]]:
    """The small network, and its units by group. A network without gates stays as it is."""
    if learner.budget is not None:
        limits: Any = experiment.limits
        limit = hc.Budget(averaged, **limits, by="gates")
        small = hc.compact(averaged, budget=limit, round_to=ROUND_TO)
        hc.recalibrate(small, batches)  # other units than the readout's may be open
        kept = hc.CompactionPlan.of(small).groups
        return small, tuple(len(kept[group.name].kept) for group in averaged.groups)
    if isinstance(averaged, hc.GatedModel):
        return hc.compact(averaged), averaged.units_left()
    return averaged, ()


def _curves(
    experiment: CifarExperiment,
    learner: Learner,
    snapshots: Iterable[tuple[int, dict[str, Tensor]]],
    sets: Sequence[Images],
    prepare: nn.Module,
    batches: Sequence[Tensor],
) -> list[dict[str, float]]:
    """Errors of the snapshots, by epoch, on each set; in the precision of the training.

    Batch norms are estimated again on the batches, as for the final network.
    """
    place, curves = learner.device, [dict[str, float]() for _ in sets]
    model = cifar_network(experiment, place)  # as large as it was at the beginning
    same = torch.autocast(
        place.type, torch.bfloat16, enabled=learner.recipe.bf16, cache_enabled=False
    )  # a cache would keep the weights of the first
    for epoch, state in snapshots:
        model.load_state_dict(state)
        with same:
            hc.recalibrate(model, batches)
        for curve, images in zip(curves, sets, strict=True):
            with same:
                curve[str(epoch)] = round(error_rate(model, images, prepare=prepare), 4)
    return curves
