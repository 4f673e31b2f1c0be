"""Images that are held out of a training set, to choose settings on."""

import torch

from hardconcrete.demo.data import Images
from hardconcrete.errors import ArgumentError


def hold_out(images: Images, count: int = 5000, seed: int = 0) -> tuple[Images, Images]:
    """Two parts of a training set: for training, and ``count`` images, drawn by ``seed``, to
    validate on. Each part keeps the order of the whole.

    Example:
        >>> import torch
        >>> whole = Images(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10), "blank")
        >>> training, validation = hold_out(whole, count=3)
        >>> len(training), len(validation)
        (7, 3)
    """
    if not 0 < count < len(images):
        raise ArgumentError(
            f"count = {count} of {len(images)} images cannot be held out; both parts need one"
        )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(len(images), dtype=torch.bool).index_fill(0, order[:count], True)
    return images.take(~held_out), images.take(held_out)
