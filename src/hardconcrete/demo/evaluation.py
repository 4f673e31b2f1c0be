"""The classes that a network predicts, and its error."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from hardconcrete.demo.data import Images

Prepare = Callable[[Tensor], Tensor]
"""Makes the input of a network from a batch of images."""


def scaled(images: Tensor) -> Tensor:
    """Pixels of 0 to 255, brought to [0, 1].

    Example:
        >>> scaled(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    return images.float().div_(255)


def error_rate(
    model: nn.Module, data: Images, batch_size: int = 1000, prepare: Prepare = scaled
) -> float:
    """Percentage of wrong predictions, in evaluation mode.

    Example:
        >>> import torch
        >>> blank = torch.zeros(4, 1, 1, 3, dtype=torch.uint8)
        >>> data = Images(blank, torch.tensor([0, 0, 0, 1]), "blank")
        >>> error_rate(torch.nn.Flatten(), data)
        25.0
    """
    wrong = answers(model, data, batch_size, prepare) != data.labels
    return 100 * int(wrong.sum()) / len(data)


def answers(
    model: nn.Module, data: Images, batch_size: int = 1000, prepare: Prepare = scaled
) -> Tensor:
    """The class that a network gives to every image, in evaluation mode and full precision.

    Example:
        >>> import torch
        >>> bright = torch.tensor([[[[0, 9]]], [[[9, 0]]]], dtype=torch.uint8)
        >>> answers(torch.nn.Flatten(), Images(bright, torch.zeros(2).long(), "bright"))
        tensor([1, 0])
    """
    training = model.training
    model.eval()
    device = next(chain(model.parameters(), [torch.zeros(())])).device
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # near ties stay as they are
    with torch.no_grad(), exact:
        predicted = [
            model(prepare(images.to(device))).argmax(1).cpu()
            for images in data.images.split(batch_size)
        ]
    model.train(training)
    return torch.cat(predicted)
