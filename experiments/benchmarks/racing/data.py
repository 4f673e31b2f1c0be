"""Images of the race: uint8 tensors on the device, batched, cropped and mirrored there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hardconcrete.demo.data import Images, Split, load_mnist
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Statistics
from hardconcrete_paper.data.cifar import load_cifar

HELD_OUT = 5000
"""Last training images, on which everything is tuned."""

SMOKE_IMAGES = 512
"""Images of each part in a smoke test."""

CLASSES = {"cifar10": 10, "cifar100": 100, "mnist": 10}
PADDING = {"cifar10": 4, "cifar100": 4, "mnist": 0}
"""Black pixels around each image, out of which a crop is taken; CIFAR is mirrored, too."""
STATISTICS = {
    "cifar10": CIFAR_STATISTICS[10],
    "cifar100": CIFAR_STATISTICS[100],
    "mnist": Statistics((0.1307,), (0.3081,)),
}


def load_split(dataset: str, split: Split, folder: Path | None) -> Images:
    """One split, from ``<dataset>-<split>.pt`` in the folder, or as the project loads it."""
    cached = folder / f"{dataset}-{split}.pt" if folder else None
    if cached and cached.exists():
        return Images(**torch.load(cached), name=dataset)
    if dataset == "mnist":
        return load_mnist(split, folder)
    return load_cifar(CLASSES[dataset], split, folder)


def cache_split(dataset: str, split: Split, folder: Path | None, out: Path) -> None:
    """Write ``<dataset>-<split>.pt``, which every process then reads."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{dataset}-{split}.pt"
    if not file.exists():
        images = load_split(dataset, split, folder)
        torch.save({"images": images.images, "labels": images.labels}, file)


@dataclass(frozen=True)
class Crops:
    """Which images each step takes, and how it crops and mirrors them; drawn before training.

    Args:
        rows: of the images, [step, batch].
        top: first row of each crop, likewise; left: its first column; mirrored: 0 or 1.
    """

    rows: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor

    def at(self, step: Tensor) -> tuple[Tensor, ...]:
        """Those of one step, whose number is a tensor of one entry."""
        columns = (self.rows, self.top, self.left, self.mirrored)
        return tuple(column.index_select(0, step)[0].long() for column in columns)


class Data:
    """Training and test images of one run, on its device.

    Args:
        dataset: ``"cifar10"``, ``"cifar100"`` or ``"mnist"``.
        validate: hold the last training images out and test on those; the test set stays closed.
        folder: where the images are.
        device: where they go.
        smoke: only a few of them.
    """

    def __init__(
        self, dataset: str, validate: bool, folder: Path | None, device: torch.device, smoke: bool
    ) -> None:
        train = load_split(dataset, "train", folder)
        if validate:
            train, test = train.take(slice(-HELD_OUT)), train.take(slice(-HELD_OUT, None))
        else:
            test = load_split(dataset, "test", folder)
        if smoke:
            train, test = train.take(slice(SMOKE_IMAGES)), test.take(slice(SMOKE_IMAGES))
        self.dataset, self.device, self.padding = dataset, device, PADDING[dataset]
        self.classes, self.size = CLASSES[dataset], train.images.shape[-1]
        padded = F.pad(train.images, (self.padding,) * 4)
        self.images = padded.permute(0, 2, 3, 1).contiguous().to(device)  # channels last
        self.labels = train.labels.to(device)
        self.test_images, self.test_labels = test.images.to(device), test.labels.to(device)
        mean, std = (
            torch.tensor(values, device=device) for values in vars(STATISTICS[dataset]).values()
        )
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __len__(self) -> int:
        return len(self.labels)

    def example(self) -> Tensor:
        """One input of the networks."""
        return self.normalise(self.test_images[:1])

    def normalise(self, images: Tensor) -> Tensor:
        """Float images of uint8 ones."""
        return images * self.scale.view(-1, 1, 1) + self.shift.view(-1, 1, 1)

    def crops(self, steps: int, batch: int, seed: int) -> Crops:
        """A shuffled pass over the images for every epoch; a last, smaller batch is left out."""
        generator = torch.Generator().manual_seed(seed)
        batch = min(batch, len(self))
        per_epoch = len(self) // batch
        passes = [
            torch.randperm(len(self), generator=generator)[: per_epoch * batch].int()
            for _ in range(-(-steps // per_epoch))
        ]
        rows = torch.cat(passes).view(-1, batch)[:steps]
        highest = 2 * self.padding + 1

        def draw(below: int) -> Tensor:
            values = torch.randint(below, rows.shape, generator=generator, dtype=torch.uint8)
            return values.to(self.device)

        mirrors = 2 if self.padding else 1
        return Crops(rows.to(self.device), draw(highest), draw(highest), draw(mirrors))

    def batch(self, crops: Crops, step: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of a step. Nothing here waits for the device."""
        rows, top, left, mirrored = crops.at(step)
        place = torch.arange(self.size, device=self.device)
        across = torch.where(mirrored[:, None] == 1, self.size - 1 - place, place)
        down = (top[:, None] + place)[:, :, None]
        across = (left[:, None] + across)[:, None, :]
        images = self.images[rows[:, None, None], down, across].permute(0, 3, 1, 2)
        return self.normalise(images), self.labels[rows]

    def batches(self, images: int, size: int = 128) -> Iterator[tuple[Tensor, Tensor]]:
        """The first training images with their labels, uncropped."""
        rows = slice(self.padding, self.padding + self.size)
        images = min(images, len(self))
        for start in range(0, images, size):
            part = self.images[start : min(start + size, images), rows, rows].permute(0, 3, 1, 2)
            yield self.normalise(part), self.labels[start : start + len(part)]
