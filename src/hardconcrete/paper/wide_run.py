"""One run of a row of table 2: trained, compacted, tested and timed."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete.paper.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete.paper.cifar_images import find_cifar, load_cifar
from hardconcrete.paper.datasets import Images, hold_out
from hardconcrete.paper.engine import Engine, error_rate
from hardconcrete.paper.latencies import latencies
from hardconcrete.paper.learner import Learner
from hardconcrete.paper.mnist import choose_device
from hardconcrete.paper.processes import agreed, rank
from hardconcrete.paper.records import RunFolder, environment
from hardconcrete.paper.stack import start_compilers
from hardconcrete.paper.training import fit, forecast, train
from hardconcrete.paper.wide import ROUND_TO, WideExperiment, wide_learner, wide_network

BATCHES = 100
"""Of training images, on which the batch norms of the averaged network are estimated."""
FEW_BATCHES = 20
"""The same, for a curve."""


@dataclass(frozen=True)
class WideResult:
    """What a run ended with; errors in percent.

    Args:
        error: of the compacted network with averaged weights, its batch norms estimated anew.
        raw_error: of the network as it was trained last, under the readout.
        units: what the compacted network has of each gated group.
        macs: multiply-adds of the compacted network, for one image, and of the dense one.
        params: parameters, likewise.
        expected_macs: under the probabilities of opening.
        seconds: of training, and of building anew what has shrunk.
        seconds_to_build: to compile and capture, before the first epoch.
        seconds_in_all: from reading the data to the last epoch, with checkpoints and all else;
            None where the run was continued.
        images_per_second: of training, over all epochs.
        peak_memory: most bytes that training had on the GPU; None on a CPU.
        latency: milliseconds of the dense and of the compacted network, by device and batch.
        curve: test error of the averaged network by epoch, from what was saved while it trained,
            its batch norms estimated anew.
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


def read_run(folder: RunFolder) -> tuple[WideExperiment, WideResult | None]:
    """What was run, and what it ended with if it did."""
    record = folder.read()
    try:
        result = WideResult.of(record["result"]) if "result" in record else None
        return WideExperiment.of(record["settings"]), result
    except (AttributeError, KeyError, TypeError, ArgumentError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise DataError(
            f"{folder.record} is no record of this version's `hardconcrete reproduce wrn`: {what}; "
            "move its folder away"
        ) from error


def run_wide(
    experiment: WideExperiment,
    *,
    out: Path,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    minutes: float | None = None,
    say: Callable[[str], object] = print,
) -> WideResult | None:
    """Train one network; None if the minutes, from now on, were over before its end.

    The test set is opened once, when it is trained; again if what follows was interrupted.
    """
    if minutes is not None and not 0 <= minutes < math.inf:
        raise ArgumentError(f"--max-minutes {minutes} must be a number of minutes")
    folder, earlier = RunFolder(out / experiment.name), None
    if folder.record.exists():
        folder.refuse_others(experiment.settings())
        _, earlier = read_run(folder)
        if earlier and (earlier.curve or not folder.checkpoint.exists()):
            return earlier  # all of it, or all there can be
    place, start = choose_device(device), time.perf_counter()
    start_compilers(place)
    training = load_cifar(experiment.classes, "train", data)
    if experiment.validate:
        training, held_out = hold_out(training)
    else:
        find_cifar(experiment.classes, "test", data)
    learner = wide_learner(experiment, len(training), place)
    if rank() == 0:  # after all that can be refused
        folder.begin(experiment.settings(), resume=resume)
        folder.note_environment(environment(place))
        if told := _forecast(learner, len(training), folder):
            say(f"note: {told}")
    agreed(0.0)  # that the folder is there
    continued = fit(learner, folder)
    prepare = Preparation(CIFAR_STATISTICS[experiment.classes]).to(place)
    engine = Engine([learner], training, prepare=prepare)
    to_build = engine.seconds_to_build
    dense_macs = hc.count(experiment.build(), torch.zeros(1, 3, 32, 32)).macs
    sizes = {group.name: group.dense_units for group in getattr(learner.model, "groups", ())}
    trained = train(engine, folder, sizes, dense_macs, facts=_widths, minutes=minutes, began=start)
    if not trained or rank() > 0:
        return None
    in_all = None if continued else round(time.perf_counter() - start, 1)
    memory = torch.cuda.max_memory_allocated() if place.type == "cuda" else None

    def open_test() -> Images:
        if experiment.validate:
            return held_out
        folder.note_opening()
        return load_cifar(experiment.classes, "test", data)

    spent = {
        "seconds_to_build": round(to_build, 1),
        "seconds_in_all": in_all,
        "peak_memory": memory,
    }
    about = {"tested_on": "5,000 held-out training images" if experiment.validate else "test set"}
    given = spent, prepare, training, open_test, folder, earlier
    for result in _examined(experiment, engine, *given):
        folder.write({**about, **folder.read(), "result": asdict(result)})
    return result


def _forecast(learner: Learner, images: int, folder: RunFolder) -> str:
    """What was foretold of the run at its beginning, or is now."""
    record = folder.read()
    if "forecast" not in record:
        record["forecast"] = forecast(learner, images // learner.recipe.batch_size)
        folder.write(record)
    return str(record["forecast"])


def _widths(model: nn.Module) -> dict[str, Any]:
    """What is there of each group, gates that are shut included: it is less after a shrink."""
    return {"widths": [group.units for group in getattr(model, "groups", ())]}


def _examined(
    experiment: WideExperiment,
    engine: Engine,
    spent: dict[str, Any],
    prepare: Preparation,
    training: Images,
    open_test: Callable[[], Images],
    folder: RunFolder,
    result: WideResult | None,
) -> Iterator[WideResult]:
    """Estimate batch norms, compact and save; then open the test set, and test.

    First what counts, then the same with latencies and curves; what a result has stays as it is.
    """
    (learner,) = engine.learners
    place, averaged = learner.device, copy.deepcopy(learner.averaged)
    rows = torch.arange(BATCHES * learner.recipe.batch_size) % len(training)
    batches = [prepare(training.images[part].to(place)) for part in rows.split(128)]
    hc.recalibrate(averaged, batches)
    small, units = averaged, tuple[int, ...]()
    if learner.budget is not None:
        limits: Any = experiment.limits
        limit = hc.Budget(averaged, **limits, by="gates")
        small = hc.compact(averaged, budget=limit, round_to=ROUND_TO)
        hc.recalibrate(small, batches)  # other units than the readout's may be open
        left = hc.CompactionPlan.of(small).groups
        units = tuple(len(left[group.name].kept) for group in averaged.groups)
    elif isinstance(averaged, hc.GatedModel):
        small, units = hc.compact(averaged), averaged.units_left()
    if small is not averaged:
        hc.save(folder.small(experiment.seed), small)
    plain, few, test = prepare.eval(), training.take(slice(10_000)), open_test()
    if result is None:
        image = torch.zeros(1, 3, 32, 32)
        own, dense = hc.count(small, image.to(place)), hc.count(experiment.build(), image)
        gated = isinstance(averaged, hc.GatedModel)
        seen = engine.epochs * engine.steps * learner.recipe.batch_size
        result = WideResult(
            error=round(error_rate(small, test, prepare=plain), 4),
            raw_error=round(error_rate(learner.model, test, prepare=plain), 4),
            units=units,
            macs=(own.macs, dense.macs),
            params=(own.params, dense.params),
            expected_macs=averaged.expected("macs").item() if gated else dense.macs,
            seconds=round(engine.seconds, 2),
            images_per_second=round(seen / engine.seconds, 1),
            latency={},
            curve={},
            training_curve={},
            **spent,
        )
        yield result
    if not result.latency:
        result = replace(result, latency=latencies(experiment.build(), small, place))
        yield result
    states = folder.snapshots(experiment.seed)
    curve, training_curve = _curves(
        experiment, learner, states, (test, few), plain, batches[:FEW_BATCHES]
    )
    yield replace(result, curve=curve, training_curve=training_curve)


def _curves(
    experiment: WideExperiment,
    learner: Learner,
    snapshots: Iterable[tuple[int, dict[str, Tensor]]],
    sets: Sequence[Images],
    prepare: nn.Module,
    batches: Sequence[Tensor],
) -> list[dict[str, float]]:
    """Errors of what was saved, by epoch, on each set; in the precision of the training.

    Batch norms are estimated anew on the batches, as for the network at the end.
    """
    place, curves = learner.device, [dict[str, float]() for _ in sets]
    model = wide_network(experiment, place)  # as large as it was at the beginning
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
