"""The residual networks of table 2 on CIFAR: what can be trained, and how."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.cost import KINDS
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.models import PreActResNet, ResNet, WideResNet
from hardconcrete_paper.training.learner import Learner, Recipe

Dataset = Literal["cifar10", "cifar100"]
Variant = Literal["dense", "dropout", "l0", "budget"]

NETWORK = re.compile(r"wrn-\d+-[1-9]\d*|(resnet|preact)-\d+")
"""Depth and width, or the depth of a network whose width is fixed."""

DROPRATE = 0.3
LAM = 0.001
"""Times 1/N, for ``"l0"``."""
MACS = 0.5
"""What a budget leaves."""
WEIGHT_DECAY = {"wrn": 5e-4, "resnet": 1e-4, "preact": 1e-4}
"""By kind of network, as each was published; the paper divides it by 0.7 on layers with gates."""
GATE_LR = 5e-3
"""Of the gates under a budget."""
SCHEDULE = (0.3, 0.6, 0.8)
"""Fractions of the training after which the learning rate falls: 60, 120 and 160 of 200 epochs."""
WARMUP = 0.1
"""Fraction of the training in which a budget comes down by default. The rest is cheaper."""
ROUND_TO = 8
"""Groups keep a multiple of so many units under a budget: other widths are slow on a GPU."""

RECORDED = {"paper_gates": "faithful"}
"""The names of settings in records, where they are older than the present names."""


@dataclass(frozen=True)
class CifarExperiment:
    """A row of table 2.

    Args:
        dataset: ``"cifar10"`` or ``"cifar100"``.
        variant: ``"dense"``, ``"dropout"`` at 0.3, ``"l0"``, or ``"budget"``.
        network: ``"wrn-28-10"`` or another depth and width, ``"resnet-110"``, ``"preact-110"``.
        lam: lambda times N, for ``"l0"`` alone; 0.001 if None.
        macs: the part of the dense multiply-adds to keep, for ``"budget"`` alone; half if neither
            this nor the next is given.
        params: the part of the dense parameters to keep, likewise.
        gate_lr: a learning rate of Adam for the gates, outside the schedule; 5e-3 for ``"budget"``.
            For ``"l0"`` the paper's has none: there the gates move with the weights, and not far.
        warmup: the part of the training in which a budget comes down; a tenth if None.
        swa: the part of the training after which the learning rate falls no further, and the
            weights that are tested are the mean of the running average over the epochs since
            (stochastic weight averaging, Izmailov et al. 2018); the paper's schedule if None.
        seed: of weights, data and gates.
        epochs: passes over the training images.
        noise: whether units that a budget leaves open go on to be dropped as often as at the start,
            instead of settling: log alpha is kept from growing.
        shrink: after how many epochs in a row a shut unit is removed while training; never if 0.
            Widths stay multiples of 16.
        paper_gates: gates where the paper has them, before the second batch norm, and two draws per
            batch, as on its two GPUs.
        validate: hold 5,000 training images out, test on those, and never open the test set.
    """

    dataset: Dataset = "cifar10"
    variant: Variant = "l0"
    network: str = "wrn-28-10"
    lam: float | None = None
    macs: float | None = None
    params: float | None = None
    gate_lr: float | None = None
    warmup: float | None = None
    swa: float | None = None
    seed: int = 0
    epochs: int = 200
    noise: bool = False
    shrink: int = 0
    paper_gates: bool = False
    validate: bool = False

    def __post_init__(self) -> None:
        for name, kinds in (("dataset", Dataset), ("variant", Variant)):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise ArgumentError(f"{name} {getattr(self, name)!r} is not known: {known}")
        self._check_limits()
        self._check_gates()
        self._check_training()
        with torch.device("meta"):
            self.build()

    def _check_limits(self) -> None:
        if self.lam is not None and not (self.variant == "l0" and 0 <= self.lam < math.inf):
            raise ArgumentError(
                f"--lam {self.lam} must not be negative or infinite, and is for --variant l0"
            )
        for name, part, of in (
            ("macs", self.macs, "multiply-adds"),
            ("params", self.params, "parameters"),
        ):
            if part is not None and not (self.variant == "budget" and 0 < part <= 1):
                raise ArgumentError(
                    f"--{name} {part} must be a part of the {of}, for --variant budget"
                )
        if self.warmup is not None and not (self.variant == "budget" and 0 < self.warmup <= 1):
            raise ArgumentError(
                f"--warmup {self.warmup} must be a part of the training, for --variant budget"
            )

    def _check_gates(self) -> None:
        has_gates = self.variant in ("l0", "budget")
        if self.gate_lr is not None and not (has_gates and 0 < self.gate_lr < math.inf):
            raise ArgumentError(
                f"--gate-lr {self.gate_lr} must be positive and finite, and is for gates: "
                "--variant l0 or budget"
            )
        if self.shrink < 0 or (self.shrink and not has_gates):
            raise ArgumentError(
                f"--shrink {self.shrink} must be a number of epochs, and is for gates: "
                "--variant l0 or budget"
            )
        if self.noise and self.variant != "budget":
            raise ArgumentError("--noise is about what a budget leaves: --variant budget")
        if self.paper_gates and self.variant != "l0":
            raise ArgumentError("--paper-gates is about gates under a lambda: --variant l0")

    def _check_training(self) -> None:
        if self.epochs < 1:
            raise ArgumentError(f"--epochs {self.epochs} must be at least 1")
        if self.swa is not None and not (0 < self.swa < 1 and 0 < self.before_mean < self.epochs):
            raise ArgumentError(
                f"--swa {self.swa} must be a part of the {self.epochs} epochs, with at least one "
                "before and one after it"
            )
        if not 0 <= self.seed < 2**31:
            raise ArgumentError(f"--seed {self.seed} must lie between 0 and 2^31")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """From a record, which has lam and macs whether the variant uses them or not."""
        unused = {"lam", "macs"} - {{"l0": "lam", "budget": "macs"}.get(settings["variant"])}
        names = {recorded: name for name, recorded in RECORDED.items()}
        used = {key: value for key, value in settings.items() if key not in unused}
        return cls(**{names.get(key, key): value for key, value in used.items()})

    def settings(self) -> dict[str, Any]:
        """All of it, for a record.

        Example:
            >>> CifarExperiment(variant="budget").settings()["macs"]
            0.5
        """
        recorded = {RECORDED.get(key, key): value for key, value in asdict(self).items()}
        return {**recorded, "lam": self.price, "macs": self.limits.get("macs")}

    @property
    def price(self) -> float:
        """Lambda times N."""
        return LAM if self.lam is None else self.lam

    @property
    def limits(self) -> dict[str, float]:
        """What a budget leaves, as parts of what the dense network has."""
        limits = {"macs": self.macs, "params": self.params}
        return {cost: part for cost, part in limits.items() if part is not None} or {"macs": MACS}

    @property
    def before_mean(self) -> int:
        """Epochs before weights are averaged over epochs."""
        return round((self.swa or 0) * self.epochs)

    @property
    def labels(self) -> list[str]:
        """How rows of one variant differ, in words."""
        if self.variant == "budget":
            marks = {"macs": "", "params": "params "}
            return [f"{marks[cost]}{part:g}" for cost, part in self.limits.items()]
        return [f"{self.price:g}"] if self.variant == "l0" else []

    @property
    def classes(self) -> Literal[10, 100]:
        """Classes of the data set."""
        return 10 if self.dataset == "cifar10" else 100

    @property
    def name(self) -> str:
        """A name for its folder.

        Example:
            >>> CifarExperiment(network="wrn-10-1", seed=3).name
            'wrn-10-1-cifar10-l0-0.001-seed3'
        """
        setting = [each.replace(" ", "") for each in self.labels]
        if self.gate_lr is not None:
            setting += [f"gates{self.gate_lr:g}"]
        if self.warmup is not None:
            setting += [f"warmup{self.warmup:g}"]
        if self.swa is not None:
            setting += [f"swa{self.swa:g}"]
        setting += ["noise"] * self.noise
        setting += [f"shrink{self.shrink}"] * bool(self.shrink)
        marks = [*["faithful"] * self.paper_gates, *["validate"] * self.validate]
        parts = [self.network, self.dataset, self.variant, *setting, *marks, f"seed{self.seed}"]
        return "-".join(parts)

    def build(self) -> nn.Module:
        """The dense network."""
        kind, *numbers = self.network.split("-")
        builders: dict[str, Any] = {"wrn": WideResNet, "resnet": ResNet, "preact": PreActResNet}
        dropout = {"dropout": DROPRATE} if self.variant == "dropout" else {}
        if not NETWORK.fullmatch(self.network) or (dropout and kind != "wrn"):
            raise ArgumentError(
                f"--network {self.network} does not exist as {self.variant}: use wrn-28-10 (depth "
                "and width), resnet-110 or preact-110"
            )
        model: nn.Module = builders[kind](*map(int, numbers), classes=self.classes, **dropout)
        return model


def cifar_network(experiment: CifarExperiment, device: torch.device) -> nn.Module:
    """A network before its first step, with gates if it has any."""
    torch.manual_seed(experiment.seed)
    model = experiment.build()  # on the CPU: a seed gives the same weights on every device
    model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if experiment.variant in ("dense", "dropout"):
        return model
    where: dict[str, Any] = {"include": "*.conv1"}
    if experiment.paper_gates:
        where = {"sites": [f"{name}:out" for name, _ in _first_convolutions(model)]}
    example = torch.zeros(1, 3, 32, 32, device=device)
    return hc.attach_gates(model, example, droprate=DROPRATE, keep_mean=True, **where)


def cifar_learner(experiment: CifarExperiment, examples: int, device: torch.device) -> Learner:
    """A network with what trains it, before its first step."""
    model = cifar_network(experiment, device)
    milestones = tuple(max(1, round(part * experiment.epochs)) for part in SCHEDULE)
    decay = WEIGHT_DECAY[experiment.network.split("-")[0]]
    recipe: dict[str, Any] = {
        "epochs": experiment.epochs,
        "batch_size": 128,
        "lr": 0.1,
        "optimizer": "sgd",
        "weight_decay": decay,
        "milestones": milestones,
        "swa": None if experiment.swa is None else experiment.before_mean,
        "bf16": device.type == "cuda",
        "averaging": 0.99,
        "shrink": experiment.shrink,
        "round_to": 16,
    }
    if not isinstance(model, hc.GatedModel):
        return Learner(experiment.variant, experiment.seed, model, Recipe(**recipe))
    if experiment.paper_gates:
        recipe["draws"] = 2
    lam = experiment.price / examples if experiment.variant == "l0" else 0.0
    penalty = hc.L0Penalty(model, lam, weight_decay=decay / 0.7, decay_moves_gates=False)
    penalties: list[Any] = [penalty]
    if experiment.variant == "budget":
        warmup = WARMUP if experiment.warmup is None else experiment.warmup
        steps = round(3 * warmup * experiment.epochs * (examples // recipe["batch_size"]))
        penalties.append(_budget(model, experiment.limits, max(3, steps)))
        if experiment.noise:
            recipe["clamp"] = -math.inf, math.log((1 - DROPRATE) / DROPRATE)
    recipe["gate_lr"] = experiment.gate_lr or (GATE_LR if penalties[1:] else None)
    return Learner(experiment.variant, experiment.seed, model, Recipe(**recipe), *penalties)


def _budget(gated: hc.GatedModel, limits: dict[str, float], steps: int) -> hc.Budget:
    """A budget with room for rounding widths up."""
    room = _filling(gated)
    targets: Any = {cost: part - min(room[cost], 0.1 * part) for cost, part in limits.items()}
    try:
        return hc.Budget(gated, **targets, steps=steps, by="gates")
    except ArgumentError as error:
        limits_in_words = " and ".join(f"--{cost} {part:g}" for cost, part in limits.items())
        aims = " and ".join(f"{target:.3g}" for target in targets.values())
        raise ArgumentError(
            f"{limits_in_words} is too small: training aims at {aims}, so that widths can be "
            f"filled up to multiples of {ROUND_TO}, and {error}"
        ) from error


def _filling(gated: hc.GatedModel) -> dict[str, float]:
    """The mean cost of rounding widths up to a multiple, as a fraction of each cost."""
    fewer = torch.ones(len(gated.gates.log_alpha), device=gated.gates.log_alpha.device)
    for group in gated.groups:
        fewer[group.start : group.start + ROUND_TO // 2] = 0
    ledger = gated.ledger
    parts = 1 - ledger.cost(fewer) / ledger.dense
    return dict(zip(KINDS, parts.tolist(), strict=True))


def _first_convolutions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Of every residual block."""
    return [(name, part) for name, part in model.named_modules() if name.endswith(".conv1")]
