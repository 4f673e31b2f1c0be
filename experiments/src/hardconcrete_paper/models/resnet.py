"""The residual networks of table 2, for images of 32 x 32 pixels."""

from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.demo import initialise
from hardconcrete.errors import ArgumentError

WIDTHS = (16, 32, 64)
"""Maps in the three stages, before any factor; each stage but the first halves the image."""


class PlainBlock(nn.Module):
    """Two convolutions, each with its norm; the sum is rectified (He et al., 2015).

    The shortcut has no parameters, as in the paper's networks for CIFAR (their option A): where the
    stage changes, it takes every other pixel and adds maps of zeros behind.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The next maps."""
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
            # Both numbers come from the tensors, so that they hold in a smaller network, too.
            x = F.pad(x, (0, 0, 0, 0, 0, out.shape[1] - x.shape[1]))
        return (out + x).relu()  # type: ignore[no-any-return]


class PreActBlock(nn.Module):
    """Norm and activation before each convolution (He et al., 2016; Zagoruyko & Komodakis, 2016).

    Where the shape changes, a 1 x 1 convolution of the activated maps is the shortcut. The paper's
    gates are on what ``conv2`` reads: the maps of ``conv1`` after norm, activation and dropout.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """The next maps."""
        active = self.bn1(x).relu()
        out = self.conv2(self.dropout(self.bn2(self.conv1(active)).relu()))
        return out + (x if self.shortcut is None else self.shortcut(active))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A residual network of 6n + 2 layers: 20, 32, 44, 56, 110.

    Example:
        >>> import torch
        >>> ResNet(20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 110, classes: int = 10) -> None:
        super().__init__()
        blocks = _blocks(depth, besides=2)
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        self.stages = nn.Sequential()
        inputs = WIDTHS[0]
        for outputs in WIDTHS:
            first = PlainBlock(inputs, outputs, 1 if inputs == outputs else 2)
            rest = (PlainBlock(outputs, outputs, 1) for _ in range(blocks - 1))
            self.stages.append(nn.Sequential(first, *rest))
            inputs = outputs
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        maps = self.stages(self.bn(self.stem(x)).relu())
        return self.fc(maps.mean((2, 3)))  # type: ignore[no-any-return]


class _PreAct(nn.Module):
    """Three stages of pre-activation blocks."""

    def __init__(self, blocks: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential()
        inputs = WIDTHS[0]
        for number, stage_width in enumerate(WIDTHS):
            outputs = width * stage_width
            first = PreActBlock(inputs, outputs, 2 if number else 1, dropout)
            rest = (PreActBlock(outputs, outputs, 1, dropout) for _ in range(blocks - 1))
            self.stages.append(nn.Sequential(first, *rest))
            inputs = outputs
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        maps = self.bn(self.stages(self.stem(x))).relu()
        return self.fc(maps.mean((2, 3)))  # type: ignore[no-any-return]


class PreActResNet(_PreAct):
    """A pre-activation residual network of 6n + 2 layers.

    Example:
        >>> import torch
        >>> PreActResNet(20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 110, classes: int = 10) -> None:
        super().__init__(_blocks(depth, besides=2), 1, classes, dropout=0.0)


class WideResNet(_PreAct):
    """A wide residual network of 6n + 4 layers, WRN-depth-width.

    Args:
        depth: 6n + 4, the three shortcuts that change the width counted.
        width: factor on the 16, 32 and 64 maps of the three stages.
        classes: of images.
        dropout: between the two convolutions of each block.

    Example:
        >>> import torch
        >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, depth: int = 28, width: int = 10, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__(_blocks(depth, besides=4), width, classes, dropout)


def _blocks(depth: int, besides: int) -> int:
    """Blocks in each of three stages, of two layers each."""
    blocks, rest = divmod(depth - besides, 6)
    if rest or blocks < 1:
        raise ArgumentError(
            f"depth {depth} is not 6n + {besides}; use {6 + besides}, {12 + besides}, "
            f"{18 + besides} and so on"
        )
    return blocks
