from functools import partial
from pathlib import Path

import pytest
import torch

from hardconcrete.demo.data import Images
from hardconcrete_paper.cifar import examination as cifar_examination
from hardconcrete_paper.cifar import run as cifar_run
from hardconcrete_paper.mnist import examination, table1
from hardconcrete_paper.mnist import run as mnist_run
from hardconcrete_paper.training import checkpoints
from hardconcrete_paper.training.learner import Recipe
from tests.demo.published import alone, mirror

__all__ = ["alone", "mirror"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """A few made-up images stand in for MNIST; the splits that were opened, in order.

    Two batches to train on, or what a test asks for; a sweep is timed on six.
    """
    splits: list[str] = []

    def load(batches: int, split: str, data: Path | None = None) -> Images:  # noqa: ARG001
        splits.append(split)
        count = 100 * batches if split == "train" else 40
        generator = torch.Generator().manual_seed(len(split))
        images = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return Images(images, torch.arange(count) % 10, "noise")

    monkeypatch.setattr(mnist_run, "load_mnist", partial(load, getattr(request, "param", 2)))
    monkeypatch.setattr(table1, "load_mnist", partial(load, 6))
    monkeypatch.setattr(mnist_run, "find_mnist", lambda *_: None)
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(examination, "TUNING", Recipe(epochs=1))
    monkeypatch.setattr(examination, "LATENCY_BATCH", 4)
    monkeypatch.setattr(examination, "LATENCY_REPEATS", 3)
    return splits


@pytest.fixture
def opened_cifar(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same for CIFAR."""
    return stand_in_for_cifar(monkeypatch)


def stand_in_for_cifar(patch: pytest.MonkeyPatch) -> list[str]:
    """Put made-up images where CIFAR is read; networks do not mind that they are small."""
    splits: list[str] = []

    def load(classes: int, split: str, data: Path | None = None) -> Images:  # noqa: ARG001
        splits.append(split)
        count = 256 if split == "train" else 40
        generator = torch.Generator().manual_seed(len(split))
        images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
        return Images(images, torch.arange(count) % classes, "noise")

    patch.setattr(cifar_run, "load_cifar", load)
    patch.setattr(cifar_run, "find_cifar", lambda *_: None)
    patch.setattr(cifar_examination, "RECALIBRATION_BATCHES", 2)
    patch.setattr(checkpoints, "CHECKPOINT_SECONDS", -1.0)
    return splits
