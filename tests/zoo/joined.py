"""Maps joined, split and shuffled."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(before)
        self.conv = nn.Conv2d(before, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(self.bn(x).relu())], dim=1)


class DenseNet(nn.Module):
    """Every layer reads all units made so far, each through norms of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(DenseLayer(8, 5), DenseLayer(13, 6))
        self.bn = nn.BatchNorm2d(19)
        self.transition = nn.Conv2d(19, 7, 1)
        self.fc = nn.Linear(28, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.transition(self.bn(self.layers(self.stem(x))).relu())
        return self.fc(F.avg_pool2d(h, 4).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 6, 3, padding=1)
        self.down2 = nn.Conv2d(6, 10, 3, padding=1)
        self.up = nn.ConvTranspose2d(10, 8, 2, stride=2)
        self.merge = nn.Conv2d(14, 7, 3, padding=1)
        self.out = nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x).relu()
        deep = self.down2(F.max_pool2d(skip, 2)).relu()
        return self.out(self.merge(torch.cat([self.up(deep), skip], dim=1)).relu())


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 9, 3, padding=1)
        self.one = nn.Conv2d(9, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(9, 6, 1), nn.ReLU(), nn.Conv2d(6, 7, 3, padding=1))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(9, 5, 1))
        self.bn = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        h = torch.cat([self.one(h), self.three(h), self.pool(h)], dim=1)
        return self.fc(self.bn(h).relu().mean((2, 3)))


class InputSkip(nn.Module):
    """The image itself is joined in: 3 of the 11 input channels of conv2 are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(11, 7, 3, padding=1)
        self.out = nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x).relu()
        return self.out(self.conv2(torch.cat([h, x], dim=1)).relu())


class Focus(nn.Module):
    """Four phases of the pixels are joined: each unit owns 4 input channels of conv2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(20, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x).relu()
        phases = [h[..., i::2, j::2] for i in range(2) for j in range(2)]
        return self.conv2(torch.cat(phases, dim=1))


class Residual(nn.Module):
    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.cv1 = nn.Conv2d(width, middle, 1)
        self.cv2 = nn.Conv2d(middle, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x).relu())


class C2f(nn.Module):
    """The first half of cv1 is only joined; the second one is also refined, by a residual block.

    Halves that lose different numbers of maps are no longer what chunk makes: the graph form.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.block = Residual(8, 6)
        self.cv2 = nn.Conv2d(24, 5, 1)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).relu().chunk(2, dim=1))
        parts.append(self.block(parts[-1]))
        return self.out(self.cv2(torch.cat(parts, dim=1)).relu().mean((2, 3)))


class CrossStage(nn.Module):
    """A split in unequal parts, one of which goes around the block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 14, 3, padding=1)
        self.deep = nn.Conv2d(9, 7, 3, padding=1)
        self.merge = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        around, through = torch.split(self.stem(x).relu(), [5, 9], dim=1)
        return self.merge(torch.cat([self.deep(through).relu(), around], dim=1))


class Res2Net(nn.Module):
    """Three parts of conv1, in a cascade.

    Part 0 goes to conv3; part 1 to convs.0; part 2 is added to what convs.0 makes, which is one
    unit with it and goes to convs.1 and, by itself, to conv3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 15, 1)
        self.convs = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(2))
        self.conv3 = nn.Conv2d(15, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.conv1(x).relu().chunk(3, dim=1)
        second = self.convs[0](second).relu()
        third = self.convs[1](second + third).relu()
        return self.conv3(torch.cat([first, second, third], dim=1))


class SummedParts(nn.Module):
    """Three parts are added, so unit k owns rows k, 6 + k and 12 + k; they stay equal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 18, 3)
        self.conv2 = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.conv1(x).chunk(3, dim=1)
        return self.conv2(a.relu() + b.tanh() * c)


def shuffle(x: Tensor, groups: int) -> Tensor:
    """ShuffleNet's permutation of the maps: map (g, k) goes to place k * groups + g."""
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width)
    return x.transpose(1, 2).reshape(batch, channels, height, width)


class ShuffleV1(nn.Module):
    """Grouped, shuffled, depthwise, grouped.

    squeeze reads 2 groups of 5: 5 units of the stem. It makes 2 groups of 8, where unit k is map k
    of both groups, in places 2k and 2k + 1 after the shuffle. expand reads places p and 8 + p as
    one, which unites units k and k + 4: 4 units of 4 maps. It makes 2 groups of 6: 6 units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1)
        self.squeeze = nn.Conv2d(10, 16, 1, groups=2)
        self.bn = nn.BatchNorm2d(16)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.expand = nn.Conv2d(16, 12, 1, groups=2)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.squeeze(self.stem(x).relu())).relu()
        return self.fc(self.expand(self.depth(shuffle(h, 2))).relu().mean((2, 3)))


class ShuffleV2(nn.Module):
    """One half goes around the branch; then both are shuffled into each other.

    Between view and reshape the maps lie in 2 rows of 6, and a row cannot be shorter than the
    other: map k of the half that goes around and map k of the branch are one unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.branch = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        around, through = self.stem(x).relu().chunk(2, dim=1)
        return self.head(shuffle(torch.cat([around, self.branch(through)], dim=1), 2))


IMAGE = tensors((3, 8, 8))
ENTRIES = (
    Entry(
        "densenet",
        DenseNet,
        IMAGE,
        {"stem": 8, "layers.0.conv": 5, "layers.1.conv": 6, "transition": 7},
    ),
    Entry("unet", UNet, IMAGE, {"down1": 6, "down2": 10, "up": 8, "merge": 7}),
    Entry(
        "inception",
        Inception,
        IMAGE,
        {"stem": 9, "one": 4, "three.0": 6, "three.2": 7, "pool.1": 5},
    ),
    Entry("input_skip", InputSkip, IMAGE, {"conv1": 8, "conv2": 7}),
    Entry("focus", Focus, IMAGE, {"conv1": 5}),
    Entry(
        "c2f",
        C2f,
        IMAGE,
        {"cv1[0:8]": 8, "cv1[8:16]": 8, "block.cv1": 6, "cv2": 5},
        form="graph",
    ),
    Entry(
        "cross_stage",
        CrossStage,
        IMAGE,
        {"stem[0:5]": 5, "stem[5:14]": 9, "deep": 7},
        form="graph",
    ),
    Entry(
        "res2net",
        Res2Net,
        IMAGE,
        {"conv1[0:5]": 5, "conv1[5:10]": 5, "conv1[10:15]": 5, "convs.1": 5},
        form="graph",
    ),
    Entry("summed_parts", SummedParts, IMAGE, {"conv1": 6}),
    Entry("shuffle_v1", ShuffleV1, IMAGE, {"stem": 5, "squeeze": 4, "expand": 6}),
    Entry(
        "shuffle_v2",
        ShuffleV2,
        IMAGE,
        {"stem[0:6]": 6, "stem[6:12]": 6, "branch.0": 8},
        form="graph",
    ),
)
