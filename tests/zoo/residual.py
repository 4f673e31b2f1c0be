"""Sums of branches: unit k of every term is one unit, named after the term that is run first."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors


class Basic(nn.Module):
    """Two convolutions; `project` maps the shortcut where the shape changes."""

    def __init__(self, before: int, middle: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, middle, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.project: nn.Module | None = None
        if before != after:
            self.project = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.project is None else self.project(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Layer 0 adds to the stem's units; layer 1 makes new ones, with its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(Basic(8, 10, 8), Basic(8, 14, 12, stride=2))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(x).relu()).mean((2, 3)))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (in groups, as in ResNeXt, where asked), 1 x 1; then the identity."""

    def __init__(self, width: int, reduced: int, middle: int, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, reduced, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(reduced)
        self.conv2 = nn.Conv2d(reduced, middle, 3, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(x + self.bn3(self.conv3(h)))


class BottleneckNet(nn.Module):
    """With 3 groups, 12 maps before conv2 are 4 units, and 15 after it are 5."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.block = Bottleneck(16, 12, 15, groups)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.block(self.stem(x)), 1).flatten(1))


class PreActivation(nn.Module):
    """A wide ResNet's block: norm and activation first, shared by both branches."""

    def __init__(self, before: int, middle: int, after: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, middle, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, after, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.bn1(x).relu()
        out = self.conv2(self.bn2(self.conv1(active)).relu())
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """conv2 and shortcut of block1 and conv2 of block2 make the same 12 units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.block1 = PreActivation(6, 10, 12)
        self.block2 = PreActivation(12, 9, 12)
        self.bn = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.block2(self.block1(self.conv1(x)))).relu()
        return self.fc(F.avg_pool2d(h, 8).view(x.size(0), -1))


class Inverted(nn.Module):
    """MobileNetV2: widen, depthwise, narrow; the identity where the shapes agree."""

    def __init__(self, before: int, wide: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.expand = nn.Conv2d(before, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.depth = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.project = nn.Conv2d(wide, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.identity = before == after

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self.bn2(self.depth(F.relu6(self.bn1(self.expand(x))))))
        h = self.bn3(self.project(h))
        return x + h if self.identity else h


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.Sequential(Inverted(8, 18, 8), Inverted(8, 20, 10, stride=2))
        self.fc = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Widened(nn.Module):
    """Two layers from 8 to 12 maps, whose shortcut is widened with zeros.

    Maps of conv2 that meet a map of the stem are one unit with it; the others, which meet a zero,
    own less (no axis of the stem and of conv1) and are a group of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 10, 3, padding=1)
        self.conv2 = nn.Conv2d(10, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 5)

    def widen(self, narrow: Tensor, wide: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        out = self.bn(self.conv2(self.conv1(h).relu()))
        return self.fc((out + self.widen(h, out)).relu().mean((2, 3)))


class PaddedBehind(Widened):
    """Sizes are taken from the tensors, and zeros stay behind: no number to repair."""

    def widen(self, narrow: Tensor, wide: Tensor) -> Tensor:
        return F.pad(narrow, (0, 0, 0, 0, 0, wide.size(1) - narrow.size(1)))


class PaddedAround(Widened):
    """ResNet's option A: maps 0, 1, 10 and 11 of conv2 meet zeros, as many as is written here."""

    def widen(self, narrow: Tensor, wide: Tensor) -> Tensor:  # noqa: ARG002
        return F.pad(narrow, (0, 0, 0, 0, 2, 2))


class JoinedZeros(Widened):
    def widen(self, narrow: Tensor, wide: Tensor) -> Tensor:
        missing = wide.size(1) - narrow.size(1)
        zeros = narrow.new_zeros(narrow.size(0), missing, *narrow.shape[2:])
        return torch.cat([narrow, zeros], dim=1)


class LayerScale(nn.Module):
    """Factors of a branch are coupled to its units; a single factor (ReZero) belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 9, 4, stride=4)
        self.depth = nn.Conv2d(9, 9, 3, padding=1, groups=9)
        self.wide = nn.Conv2d(9, 14, 1)
        self.narrow = nn.Conv2d(14, 9, 1)
        self.scale = nn.Parameter(torch.randn(9, 1, 1))
        self.mix = nn.Conv2d(9, 9, 1)
        self.zero = nn.Parameter(torch.rand(()))
        self.fc = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.scale * self.narrow(F.gelu(self.wide(self.depth(h))))
        h = h + self.zero * self.mix(h)
        return self.fc(h.mean((2, 3)))


IMAGE = tensors((3, 8, 8))
ENTRIES = (
    Entry(
        "resnet",
        ResNet,
        IMAGE,
        {"stem": 8, "layers.0.conv1": 10, "layers.1.conv1": 14, "layers.1.conv2": 12},
    ),
    Entry("bottleneck", BottleneckNet, IMAGE, {"stem": 16, "block.conv1": 12, "block.conv2": 15}),
    Entry(
        "resnext",
        lambda: BottleneckNet(groups=3),
        IMAGE,
        {"stem": 16, "block.conv1": 4, "block.conv2": 5},
    ),
    Entry(
        "wide_resnet",
        WideResNet,
        IMAGE,
        {"conv1": 6, "block1.conv1": 10, "block1.conv2": 12, "block2.conv1": 9},
    ),
    Entry(
        "mobilenet",
        MobileNet,
        IMAGE,
        {"stem": 8, "blocks.0.expand": 18, "blocks.1.expand": 20, "blocks.1.project": 10},
    ),
    Entry("padded_behind", PaddedBehind, IMAGE, {"stem": 8, "conv1": 10, "conv2[8:12]": 4}),
    Entry(
        "padded_around",
        PaddedAround,
        IMAGE,
        {"stem": 8, "conv1": 10, "conv2[0:12]": 4},
        form="graph",
    ),
    Entry("joined_zeros", JoinedZeros, IMAGE, {"stem": 8, "conv1": 10, "conv2[8:12]": 4}),
    Entry("layer_scale", LayerScale, IMAGE, {"stem": 9, "wide": 14}),
)
