"""What a method of the race gets, and what it gives back."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from benchmarks.racing.checkpoint import Checkpoint

WEIGHT_DECAY = 5e-4
"""Of all parameters."""

IMAGES = 2048
"""Training images that a method may look at to prune, and those that re-estimate batch norms."""

REGULARIZATION = 5e-4
"""Strength of torch-pruning's sparse training; as in its own benchmark on CIFAR."""

SPARSE_PART = 0.5
"""Part of the steps after the dense training that are sparse training; half in its benchmark."""


ADAMW = ("vit-tiny",)
"""Networks that are trained with AdamW; the others with SGD."""


def optimizer_of(network: str) -> str:
    """``"adamw"`` or ``"sgd"``."""
    return "adamw" if network in ADAMW else "sgd"


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Args:
        steps: in all.
        peak_lr: the highest rate.
        seed: of the order and the crops of the images.
        schedule: of the rate, one of ``SCHEDULES``.
        compiled: whether ``torch.compile`` makes the forward and backward pass.
        weight_decay: of all parameters, for SGD.
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    steps: int
    peak_lr: float
    seed: int = 0
    schedule: str = "one-cycle"
    compiled: bool = False
    weight_decay: float = WEIGHT_DECAY
    optimizer: str = "sgd"


@dataclass(frozen=True)
class Settings:
    """What a method gets besides the model and the data.

    Args:
        network: its name.
        target: the fraction of the dense multiply-adds to keep.
        steps: of training that are left to the method; 0: it may only prune.
        peak_lr: of these steps.
        seed: of everything that is drawn.
        regularization: strength of torch-pruning's sparse training.
        sparse_part: of the steps, those that are sparse training.
        round_to: widths are multiples of this.
        images: training images that a method may look at to prune.
        schedule: of the rate.
        compiled: whether ``torch.compile`` makes the forward and backward pass.
        checkpoint: of a training that can be continued, and when every training has to stop.
    """

    network: str
    target: float
    steps: int
    peak_lr: float
    seed: int
    regularization: float = REGULARIZATION
    sparse_part: float = SPARSE_PART
    round_to: int = 1
    images: int = IMAGES
    schedule: str = "one-cycle"
    compiled: bool = False
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def recipe(self, seed: int = 0, **changes: Any) -> Recipe:
        """How the method trains.

        Args:
            seed: added to that of the job, so that two trainings of a job see other crops.
            changes: of the recipe.
        """
        own = Recipe(
            self.steps, self.peak_lr, self.seed + seed, self.schedule, self.compiled,
            optimizer=optimizer_of(self.network),
        )  # fmt: skip
        return replace(own, **changes)


@dataclass
class Outcome:
    """The small network, with seconds of pruning and of training, and what else to record."""

    model: nn.Module
    prune_seconds: float = 0.0
    train_seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
