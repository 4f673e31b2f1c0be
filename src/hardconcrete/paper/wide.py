"""The residual networks of table 2 on CIFAR: what can be trained, and one run of it."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.paper.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete.paper.cifar_images import load_cifar
from hardconcrete.paper.datasets import Images, hold_out
from hardconcrete.paper.engine import Engine, error_rate
from hardconcrete.paper.latencies import latencies
from hardconcrete.paper.learner import Learner, Recipe, rank
from hardconcrete.paper.mnist import choose_device
from hardconcrete.paper.models import PreActResNet, ResNet, WideResNet
from hardconcrete.paper.records import RunFolder, environment
from hardconcrete.paper.training import fit, train

Dataset = Literal["cifar10", "cifar100"]
Variant = Literal["dense", "dropout", "l0", "budget"]

DROPRATE = 0.3
WEIGHT_DECAY = {"wrn": 5e-4, "resnet": 1e-4, "preact": 1e-4}
"""By kind of network, as each was published; the paper divides it by 0.7 on layers with gates."""
GATE_LR = 5e-3
"""Of the gates under a budget."""
SCHEDULE = (0.3, 0.6, 0.8)
"""Parts of the training after which the learning rate falls: 60, 120 and 160 of 200 epochs."""
WARMUP = 0.1
"""Part of the training in which a budget comes down, unless told otherwise: the rest is cheaper."""
BATCHES = 100
"""Of training images, on which the batch norms of the averaged network are estimated."""
FEW_BATCHES = 20
"""The same, for a curve."""
ROUND_TO = 8
"""What a budget leaves of each group is a multiple of this: other widths are slow on a GPU."""


@dataclass(frozen=True)
class WideExperiment:
    """A row of table 2.

    Args:
        dataset: ``"cifar10"`` or ``"cifar100"``.
        variant: ``"dense"``, ``"dropout"`` at 0.3, ``"l0"``, or ``"budget"``.
        network: ``"wrn-28-10"`` or another depth and width, ``"resnet-110"``, ``"preact-110"``.
        lam: lambda times N, for ``"l0"``.
        macs: the part of the dense multiply-adds to keep, for ``"budget"``.
        gate_lr: a learning rate of Adam for the gates, outside the schedule; 5e-3 for ``"budget"``.
            For ``"l0"`` the paper's has none: there the gates move with the weights, and not far.
        warmup: the part of the training in which a budget comes down; a tenth if None.
        seed: of weights, data and gates.
        epochs: passes over the training images.
        noise: whether units that a budget leaves open go on to be dropped as often as at the start,
            instead of settling: log alpha is kept from growing.
        shrink: after how many epochs in a row a shut unit is removed while training; never if 0.
            Widths stay multiples of 16.
        faithful: gates where the paper has them, before the second batch norm, and two draws per
            batch, as on its two GPUs.
        validate: hold 5,000 training images out, test on those, and never open the test set.
    """

    dataset: Dataset = "cifar10"
    variant: Variant = "l0"
    network: str = "wrn-28-10"
    lam: float = 0.001
    macs: float = 0.5
    gate_lr: float | None = None
    warmup: float | None = None
    seed: int = 0
    epochs: int = 200
    noise: bool = False
    shrink: int = 0
    faithful: bool = False
    validate: bool = False

    def __post_init__(self) -> None:
        for name, kinds in (("dataset", Dataset), ("variant", Variant)):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise ArgumentError(f"{name} {getattr(self, name)!r} is not known: {known}")
        if self.epochs < 1:
            raise ArgumentError(f"--epochs {self.epochs} must be at least 1")
        if not 0 <= self.lam < math.inf:
            raise ArgumentError(f"--lam {self.lam} must not be negative or infinite")
        if self.warmup is not None and not (self.variant == "budget" and 0 < self.warmup <= 1):
            raise ArgumentError(
                f"--warmup {self.warmup} must be a part of the training, for --variant budget"
            )
        if self.noise and self.variant != "budget":
            raise ArgumentError("--noise is about what a budget leaves: --variant budget")
        if self.faithful and self.variant != "l0":
            raise ArgumentError("--faithful is about gates under a lambda: --variant l0")
        if not 0 <= self.seed < 2**31:
            raise ArgumentError(f"--seed {self.seed} must lie between 0 and 2^31")
        with torch.device("meta"):
            self.build()

    @property
    def classes(self) -> Literal[10, 100]:
        """Classes of the data set."""
        return 10 if self.dataset == "cifar10" else 100

    @property
    def name(self) -> str:
        """A name for its folder.

        Example:
            >>> WideExperiment(network="wrn-10-1", seed=3).name
            'wrn-10-1-cifar10-l0-0.001-seed3'
        """
        setting = {"l0": [f"{self.lam:g}"], "budget": [f"{self.macs:g}"]}.get(self.variant, [])
        if self.gate_lr is not None:
            setting += [f"gates{self.gate_lr:g}"]
        if self.warmup is not None:
            setting += [f"warmup{self.warmup:g}"]
        setting += ["noise"] * self.noise
        setting += [f"shrink{self.shrink}"] * bool(self.shrink)
        marks = [*["faithful"] * self.faithful, *["validate"] * self.validate]
        parts = [self.network, self.dataset, self.variant, *setting, *marks, f"seed{self.seed}"]
        return "-".join(parts)

    def build(self) -> nn.Module:
        """The dense network."""
        kind, *numbers = self.network.split("-")
        builders: dict[str, Any] = {"wrn": WideResNet, "resnet": ResNet, "preact": PreActResNet}
        dropout = {"dropout": DROPRATE} if self.variant == "dropout" else {}
        try:
            model: nn.Module = builders[kind](*map(int, numbers), classes=self.classes, **dropout)
            return model
        except ArgumentError:
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise ArgumentError(
                f"--network {self.network} does not exist as {self.variant}: use wrn-28-10, "
                "resnet-110 or preact-110"
            ) from error


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
    """Train one network; None if the minutes were over before its end.

    The test set is opened once, when it is trained.
    """
    folder = RunFolder(out / experiment.name)
    if folder.record.exists():
        folder.refuse_others(asdict(experiment))
        if "result" in folder.read():
            return WideResult.of(folder.read()["result"])
    place, start = choose_device(device), time.perf_counter()
    training = load_cifar(experiment.classes, "train", data)
    if experiment.validate:
        training, held_out = hold_out(training)
    if rank() == 0:
        folder.begin(asdict(experiment), resume=resume)
    learner = wide_learner(experiment, len(training), place)
    continued = fit(learner, folder)
    prepare = Preparation(CIFAR_STATISTICS[experiment.classes]).to(place)
    engine = Engine([learner], training, prepare=prepare)
    to_build = engine.seconds_to_build
    dense_macs = hc.count(experiment.build(), torch.zeros(1, 3, 32, 32)).macs
    forecast = _forecast(learner, engine.steps) if experiment.variant == "l0" else ""
    if forecast and rank() == 0:
        say(f"note: {forecast}")
    sizes = {group.name: group.all_units for group in getattr(learner.model, "groups", ())}
    if not train(engine, folder, sizes, dense_macs, facts=_widths, minutes=minutes) or rank() > 0:
        return None
    in_all = None if continued else round(time.perf_counter() - start, 1)
    memory = torch.cuda.max_memory_allocated() if place.type == "cuda" else None

    def open_test() -> Images:
        folder.note_opening()
        return held_out if experiment.validate else load_cifar(experiment.classes, "test", data)

    spent = {
        "seconds_to_build": round(to_build, 1),
        "seconds_in_all": in_all,
        "peak_memory": memory,
    }
    about = {
        "environment": environment(place),
        "tested_on": "5,000 held-out training images" if experiment.validate else "test set",
        "forecast": forecast,
    }
    for result in _examined(experiment, engine, spent, prepare, training, open_test, folder):
        folder.write({**folder.read(), **about, "result": asdict(result)})
    return result


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
) -> Iterator[WideResult]:
    """Estimate batch norms, compact and save; then open the test set, and test.

    First what counts, then the same with latencies and curves.
    """
    (learner,) = engine.learners
    place, averaged = learner.device, copy.deepcopy(learner.averaged)
    rows = torch.arange(BATCHES * learner.recipe.batch_size) % len(training)
    batches = [prepare(training.images[part].to(place)) for part in rows.split(128)]
    hc.recalibrate(averaged, batches)
    small, units = averaged, tuple[int, ...]()
    if learner.budget is not None:
        limit = hc.Budget(averaged, macs=experiment.macs)
        small = hc.compact(averaged, budget=limit, round_to=ROUND_TO)
        hc.recalibrate(small, batches)  # other units than the readout's may be open
        left = hc.CompactionPlan.of(small).groups
        units = tuple(len(left[group.name].kept) for group in averaged.groups)
    elif isinstance(averaged, hc.GatedModel):
        small, units = hc.compact(averaged), averaged.units_left()
    if small is not averaged:
        hc.save(folder.small(experiment.seed), small)
    image = torch.zeros(1, 3, 32, 32)
    own, dense = hc.count(small, image.to(place)), hc.count(experiment.build(), image)
    plain, few, test = prepare.eval(), training.take(slice(10_000)), open_test()
    gated = isinstance(averaged, hc.GatedModel)
    seen = engine.epochs * engine.steps * learner.recipe.batch_size
    result = WideResult(
        error=round(error_rate(small, test, prepare=plain), 4),
        raw_error=round(error_rate(learner.model, test, prepare=plain), 4),
        units=units,
        macs=(own.macs, dense.macs),
        params=(own.params, dense.params),
        expected_macs=averaged.expected("macs").item() if gated else dense.macs,
        seconds=round(engine.seconds, 1),
        images_per_second=round(seen / engine.seconds, 1),
        latency={},
        curve={},
        training_curve={},
        **spent,
    )
    yield result
    result = replace(result, latency=latencies(experiment.build(), small, place))
    yield result
    states = folder.snapshots(experiment.seed)
    curve, training_curve = _curves(
        experiment, learner, states, (test, few), plain, batches[:FEW_BATCHES]
    )
    yield replace(result, curve=curve, training_curve=training_curve)


def _forecast(learner: Learner, steps: int) -> str:
    """What is known beforehand of how far the penalty takes the gates; empty if far enough."""
    recipe, (penalty, *_) = learner.recipe, learner.objective.penalties
    moves_gates = learner.optimizers[-1 if recipe.gate_lr else 0]
    falls = None if recipe.gate_lr else lambda step: recipe.rate(step // steps) / recipe.lr
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hc.check_run(penalty, moves_gates, steps * recipe.epochs, falls)  # type: ignore[arg-type]
    return " ".join(str(warning.message) for warning in caught)


def wide_learner(experiment: WideExperiment, examples: int, device: torch.device) -> Learner:
    """A network with what trains it, before its first step."""
    torch.manual_seed(experiment.seed)
    model = experiment.build()  # on the CPU: a seed gives the same weights on every device
    model = model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    milestones = tuple(round(part * experiment.epochs) for part in SCHEDULE)
    decay = WEIGHT_DECAY[experiment.network.split("-")[0]]
    recipe: dict[str, Any] = {
        "epochs": experiment.epochs,
        "batch_size": 128,
        "lr": 0.1,
        "optimizer": "sgd",
        "weight_decay": decay,
        "milestones": milestones,
        "bf16": device.type == "cuda",
        "averaging": 0.99,
        "shrink": experiment.shrink,
        "round_to": 16,
    }
    if experiment.variant in ("dense", "dropout"):
        return Learner(experiment.variant, experiment.seed, model, Recipe(**recipe))
    example = torch.zeros(1, 3, 32, 32, device=device)
    where: dict[str, Any] = {"include": "*.conv1"}
    if experiment.faithful:
        where = {"sites": [f"{name}:out" for name, _ in _first_convolutions(model)]}
        recipe["draws"] = 2
    gated = hc.attach_gates(model, example, droprate=DROPRATE, keep_mean=True, **where)
    lam = experiment.lam / examples if experiment.variant == "l0" else 0.0
    penalty = hc.L0Penalty(gated, lam, weight_decay=decay / 0.7, decay_moves_gates=False)
    penalties: list[Any] = [penalty]
    if experiment.variant == "budget":
        target = experiment.macs - min(_filling(gated), 0.1 * experiment.macs)
        warmup = WARMUP if experiment.warmup is None else experiment.warmup
        steps = round(3 * warmup * experiment.epochs * (examples // recipe["batch_size"]))
        penalties.append(hc.Budget(gated, macs=target, steps=max(3, steps)))
        if experiment.noise:
            recipe["clamp"] = -math.inf, math.log((1 - DROPRATE) / DROPRATE)
    recipe["gate_lr"] = experiment.gate_lr or (GATE_LR if penalties[1:] else None)
    return Learner(experiment.variant, experiment.seed, gated, Recipe(**recipe), *penalties)


def _filling(gated: hc.GatedModel) -> float:
    """What filling a group up to a multiple costs on average, as a part of the multiply-adds."""
    fewer = torch.ones(len(gated.gates.log_alpha), device=gated.gates.log_alpha.device)
    for group in gated.groups:
        fewer[group.start : group.start + ROUND_TO // 2] = 0
    ledger = gated.ledger
    return 1 - (ledger.delivered(fewer)[1] / ledger.dense[1]).item()


def _first_convolutions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Of every residual block."""
    return [(name, part) for name, part in model.named_modules() if name.endswith(".conv1")]


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
    model = wide_learner(experiment, 1, place).model  # as large as it was at the beginning
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
