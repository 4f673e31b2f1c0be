"""What can be trained on MNIST: the networks of table 1, and how each is made."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.mnist.flops import Macs, lenet5_uncoupled_macs, mlp_uncoupled_macs
from hardconcrete_paper.models import LeNet5, with_dropout
from hardconcrete_paper.training.learner import Learner, Recipe

Method = Literal["l0", "dense", "dropout", "budget"]

EPOCHS = 200
"""The paper's."""

GATE_LR = 1e-2
"""Learning rate of the gates where a budget moves them."""

TRAINING_PER_AVERAGE = 20
"""The running average reaches back over at most 1/20 of the training. Units are counted on it, so
it must not lag behind in a short training."""

QUIRKS = {
    "clamp": "log alpha is kept within log 100 of 0 after each step",
    "average": "the average starts at the initial weights and is divided by 1 - decay^steps",
    "bias": "convolutions train without bias, and the L0 term of that bias has the wrong sign",
}
"""Where the authors' public code differs from the paper."""


@dataclass(frozen=True)
class Network:
    """A network of table 1: where its gates sit, what it costs and what the paper found."""

    build: Callable[[], nn.Module]
    droprate: Mapping[str, float]
    sizes: Mapping[str, int]
    dense_macs: int
    uncoupled: Macs
    rows: Mapping[tuple[float, ...], tuple[str, str, float]]
    """Title, units left and error in percent, by lambda times N."""


NETWORKS = {
    "mlp": Network(
        build=MLP,
        droprate={"fc1:in": 0.2, "fc2:in": 0.5, "fc3:in": 0.5},
        sizes={"fc1:in": 784, "fc2:in": 300, "fc3:in": 100},
        dense_macs=266_200,
        uncoupled=mlp_uncoupled_macs,
        rows={
            (0.1,): ("lambda = 0.1/N", "219-214-100", 1.4),
            (0.1, 0.5, 5.0): ("lambda sep.", "266-88-33", 1.8),
        },
    ),
    "lenet5": Network(
        build=LeNet5,
        droprate={"conv1:out": 0.5, "conv2:out": 0.5, "fc1:in": 0.5, "fc2:in": 0.5},
        sizes={"conv1:out": 20, "conv2:out": 50, "fc1:in": 800, "fc2:in": 500},
        dense_macs=2_293_000,
        uncoupled=lenet5_uncoupled_macs,
        rows={
            (0.1,): ("lambda = 0.1/N", "20-25-45-462", 0.9),
            (10.0, 0.5, 0.1, 10.0): ("lambda sep.", "9-18-65-25", 1.0),
        },
    ),
}


@dataclass(frozen=True)
class MnistExperiment:
    """A row of table 1, or any other setting of its lambdas.

    Args:
        network: ``"mlp"`` or ``"lenet5"``.
        lam: lambda times N, one for all groups or one for each; none for other methods.
        seeds: networks that are trained side by side.
        epochs: passes over the training images.
        validate: hold 5,000 training images out, test on those, and never open the test set.
        method: ``"l0"``; ``"dense"``; ``"dropout"`` where the gates would be, at their rates; or
            ``"budget"``.
        quirks: some or all of ``QUIRKS``, in which the authors' public code differs from the paper.
        weight_decay: coefficient of the L2 norm, expected under the gates (eq. 17); the paper's own
            rows on MNIST have none.
        per_example: draw gates for every example; the paper draws them once per batch.
        shrink: after how many epochs in a row a shut unit is removed while training; never if 0.
        macs: multiply-adds that the budget leaves, as a part of the dense ones.
        params: parameters likewise.
    """

    network: str
    lam: tuple[float, ...] = (0.1,)
    seeds: tuple[int, ...] = (0,)
    epochs: int = EPOCHS
    validate: bool = False
    method: Method = "l0"
    quirks: tuple[str, ...] = ()
    weight_decay: float = 0.0
    per_example: bool = False
    shrink: int = 0
    macs: float | None = None
    params: float | None = None

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ArgumentError(f"network {self.network!r} is not known: {', '.join(NETWORKS)}")
        if self.method not in get_args(Method):
            raise ArgumentError(
                f"method {self.method!r} is not known: {', '.join(get_args(Method))}"
            )
        self._check_lambdas()
        self._check_training()

    def _check_lambdas(self) -> None:
        groups = list(NETWORKS[self.network].sizes)
        if self.method == "l0" and len(self.lam) not in (1, len(groups)):
            raise ArgumentError(
                f"--lam takes one number or one for each of {', '.join(groups)}, "
                f"not {len(self.lam)}"
            )
        if self.method != "l0" and (self.lam or self.quirks):
            raise ArgumentError(f"a {self.method} network has no lambdas and no quirks of theirs")
        if (self.method == "budget") != bool(self.limits):
            raise ArgumentError("a budget, and nothing else, takes macs=... or params=...")
        for quirk in {*self.quirks} - {*QUIRKS}:
            raise ArgumentError(f"quirk {quirk!r} is not known: {', '.join(QUIRKS)}")
        for lam in self.lam:
            if not 0 <= lam < math.inf:
                raise ArgumentError(f"--lam {lam} must not be negative or infinite")

    def _check_training(self) -> None:
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ArgumentError(f"--seeds {self.seeds} must name at least one seed, each once")
        for seed in self.seeds:
            if not 0 <= seed < 2**31:
                raise ArgumentError(f"--seeds {seed} must lie between 0 and 2^31")
        if self.shrink < 0 or (self.shrink and self.method in ("dense", "dropout")):
            raise ArgumentError(
                f"--shrink {self.shrink}: a number of epochs, for networks with gates"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ArgumentError(
                f"--weight-decay {self.weight_decay} must not be negative or infinite"
            )
        if self.per_example and self.method in ("dense", "dropout"):
            raise ArgumentError(f"--per-example is about gates: a {self.method} network has none")
        if self.epochs < 1:
            raise ArgumentError(f"--epochs {self.epochs} must be at least 1")

    @property
    def name(self) -> str:
        """A name for its folder.

        Example:
            >>> MnistExperiment("mlp", (0.1, 0.5, 5.0), quirks=("clamp", "bias")).name
            'mlp-0.1-0.5-5-clamp-bias'
            >>> MnistExperiment("lenet5", weight_decay=5e-4, validate=True).name
            'lenet5-0.1-decay0.0005-validate'
        """
        method = [f"{lam:g}" for lam in self.lam] if self.method == "l0" else [self.method]
        method += [f"{cost}-{limit:g}" for cost, limit in self.limits.items()]
        marks = [f"decay{self.weight_decay:g}"] * bool(self.weight_decay)
        marks += ["example"] * self.per_example
        marks += [*[f"shrink{self.shrink}"] * bool(self.shrink), *["validate"] * self.validate]
        return "-".join([self.network, *method, *self.quirks, *marks])

    @property
    def limits(self) -> dict[str, float]:
        """What a budget leaves of each cost."""
        limits = {"macs": self.macs, "params": self.params}
        return {cost: limit for cost, limit in limits.items() if limit is not None}

    @property
    def title(self) -> str:
        """What it is called in a table."""
        if self.method == "budget":
            return ", ".join(f"{limit:.0%} of the {cost}" for cost, limit in self.limits.items())
        if self.method != "l0":
            return self.method
        rows = NETWORKS[self.network].rows
        lams = ", ".join(f"{lam:g}" for lam in self.lam)
        title = rows[self.lam][0] if self.lam in rows else f"lambda = ({lams})/N"
        return ", ".join(["L0", title, *self.quirks])

    def settings(self) -> dict[str, Any]:
        """All of it, as JSON would have it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def learner(experiment: MnistExperiment, seed: int, examples: int, device: torch.device) -> Learner:
    """A network of an experiment, before its first step."""
    torch.manual_seed(seed)
    network, quirks = NETWORKS[experiment.network], experiment.quirks
    recipe = Recipe(
        epochs=experiment.epochs,
        clamp=(-math.log(100), math.log(100)) if "clamp" in quirks else None,
        divided_average="average" in quirks,
        gate_lr=GATE_LR if experiment.method == "budget" else None,
        weight_decay=experiment.weight_decay,
        per_example=experiment.per_example,
        shrink=experiment.shrink,
    )
    if experiment.method in ("dense", "dropout"):
        rates = network.droprate if experiment.method == "dropout" else {}
        model = with_dropout(network.build(), rates).to(device)
        return Learner(f"seed {seed}", seed, model, recipe)
    gated = with_gates(network, device, experiment.per_example)
    lam = lambdas(gated, experiment.lam or (0.0,), examples)
    if "bias" in quirks:
        _freeze_biases(gated.model)
        lam = _without_bias(gated, lam)
    penalties: list[Any] = []
    if experiment.method == "l0" or recipe.weight_decay:
        penalties.append(hc.L0Penalty(gated, lam, weight_decay=recipe.weight_decay))
    if experiment.method == "budget":
        limits: Any = experiment.limits
        steps = max(3, experiment.epochs * (examples // recipe.batch_size))
        penalties.append(hc.Budget(gated, steps=steps, by="gates", **limits))
        recipe = replace(
            recipe, averaging=min(recipe.averaging, max(0.0, 1 - TRAINING_PER_AVERAGE / steps))
        )
    return Learner(f"seed {seed}", seed, gated, recipe, *penalties)


def with_gates(network: Network, device: torch.device, per_example: bool = False) -> hc.GatedModel:
    """A network with the paper's gates, for one image."""
    model, image = network.build().to(device), torch.zeros(1, 1, 28, 28, device=device)
    how: Any = {"droprate": network.droprate, "sample": "example" if per_example else "batch"}
    return hc.attach_gates(model, image, sites=[*network.sizes], **how)


def lambdas(gated: hc.GatedModel, lam: Sequence[float], examples: int) -> dict[str, float]:
    """Lambda of every group, from lambda times N: one number for all groups or one for each."""
    each = [*lam] * len(gated.groups) if len(lam) == 1 else lam
    return {group.name: value / examples for group, value in zip(gated.groups, each, strict=True)}


def _freeze_biases(model: nn.Module) -> None:
    """Keep the biases of convolutions at zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module._parameters["bias"].requires_grad_(False)  # type: ignore[union-attr]


def _without_bias(gated: hc.GatedModel, lam: dict[str, float]) -> dict[str, float]:
    """With the biases of convolutions taken from |g| instead of added to it.

    A map of k weights and a bias then costs lambda (k - 1), not lambda (k + 1).
    """
    factors = {g.name: (g.size - 2) / g.size for g in gated.groups if g.name.endswith(":out")}
    return {name: value * factors.get(name, 1.0) for name, value in lam.items()}
