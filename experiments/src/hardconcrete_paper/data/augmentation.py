"""Preparing a batch of CIFAR images on its device.

Nothing here waits for the device or copies to it, so a CUDA graph can capture it. The generator is
then registered with the graph.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each channel over the training pixels, scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR_STATISTICS = {
    10: Statistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: Statistics((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""By number of classes."""

PADDING = 4
"""Black pixels that are added on each side before an image is cropped to its size."""


class Preparation(nn.Module):
    """Images of 0 to 255 in any type, normalised; in training cropped and mirrored at random first.

    Args:
        statistics: of the training images.
        padding: how far a crop may be off, in pixels.
        generator: on the device of the images; by default that of the device.

    Example:
        >>> import torch
        >>> images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> prepare = Preparation(CIFAR_STATISTICS[10], generator=torch.Generator().manual_seed(0))
        >>> prepare(images).dtype, torch.equal(prepare(images), prepare(images))
        (torch.float32, False)
        >>> prepare = prepare.eval()
        >>> torch.equal(prepare(images), prepare(images))
        True
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        statistics: Statistics,
        padding: int = PADDING,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        mean, std = (
            torch.tensor(values).view(-1, 1, 1) for values in (statistics.mean, statistics.std)
        )
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.padding, self.generator = padding, generator

    def forward(self, images: Tensor) -> Tensor:
        """Float images [N, channels, height, width]."""
        if self.training:
            images = crop_and_flip(images, self.padding, self.generator)
        return images * self.scale + self.shift


def crop_and_flip(
    images: Tensor, padding: int = PADDING, generator: torch.Generator | None = None
) -> Tensor:
    """Each image padded with zeros, cropped at a random place, and mirrored with probability 1/2.

    Example:
        >>> import torch
        >>> line = torch.arange(1, 5).view(1, 1, 1, 4).expand(3, 1, 1, 4)
        >>> crop_and_flip(line, 1, torch.Generator().manual_seed(8)).shape
        torch.Size([3, 1, 1, 4])
    """
    count, _, height, width = images.shape
    draw = partial(torch.randint, device=images.device, generator=generator)
    top, left = draw(2 * padding + 1, (2, count, 1))
    flipped = draw(2, (count, 1)) == 1
    rows = top + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = left + torch.where(flipped, width - 1 - columns, columns)
    padded = F.pad(images, (padding,) * 4)
    each = torch.arange(count, device=images.device).view(-1, 1, 1)
    # Indexing puts the channels last, and they stay last in memory.
    return padded[each, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
