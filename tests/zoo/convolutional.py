"""Convolutions of every kind, pooling, norms, and the ways from maps to dense layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors


class LeNet(nn.Module):
    """Each map of conv2 owns 4 columns of fc1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 10, 3, padding=1)
        self.fc1 = nn.Linear(40, 14)
        self.fc2 = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


class LiteralView(nn.Module):
    """The 96 is written into the code, where no attribute can repair it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(96, 11)
        self.fc2 = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.conv(x).relu().view(-1, 96)).relu())


class StoredChannels(nn.Module):
    """The size is an attribute, which becomes truthful again."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 12
        self.conv = nn.Conv2d(3, self.channels, 3)
        self.fc1 = nn.Linear(self.channels, 10)
        self.fc2 = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x).relu().view(x.size(0), self.channels, -1)
        return self.fc2(self.fc1(maps.amax(2)).relu())


class StoredDecoy(StoredChannels):
    """As StoredChannels, with a second attribute that only happens to be 12 and must stay 12."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 12

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 10, 3, padding=1),
        nn.BatchNorm2d(10),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(40, 14),
        nn.ReLU(inplace=True),
        nn.Linear(14, 5),
    )


def conv1d() -> nn.Module:
    """Padding of the length leaves the channels alone."""
    return nn.Sequential(
        nn.Conv1d(3, 7, 3, padding=1),
        nn.BatchNorm1d(7),
        nn.ReLU(),
        nn.Conv1d(7, 9, 3, padding=1, padding_mode="circular"),
        nn.Hardswish(),
        nn.AdaptiveMaxPool1d(2),
        nn.Flatten(),
        nn.Linear(18, 4),
    )


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 5, 3, padding=1),
        nn.BatchNorm3d(5),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(5, 7, 3, padding=1),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(7, 4),
    )


def adaptive_pooling() -> nn.Module:
    """Each of 7 maps owns 4 columns of the dense layer."""
    return nn.Sequential(
        nn.Conv2d(3, 9, 3),
        nn.SiLU(),
        nn.Conv2d(9, 7, 3),
        nn.AdaptiveAvgPool2d((2, 2)),
        nn.Flatten(),
        nn.Linear(28, 4),
    )


def channel_prelu() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 9, 3), nn.PReLU(9), nn.Conv2d(9, 7, 3), nn.PReLU(7), nn.Conv2d(7, 2, 1)
    )


def instance_norm() -> nn.Module:
    """Statistics are taken over the pixels of one map, so a map can go."""
    return nn.Sequential(
        nn.Conv2d(3, 9, 3),
        nn.InstanceNorm2d(9, affine=True),
        nn.ReLU(),
        nn.Conv2d(9, 7, 3),
        nn.InstanceNorm2d(7, affine=True, track_running_stats=True),
        nn.ReLU(),
        nn.Conv2d(7, 2, 1),
    )


def group_norm() -> nn.Module:
    """Statistics are taken over 4 maps together, so these go together: 3 units."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 10, 3),
        nn.ReLU(),
        nn.Conv2d(10, 2, 1),
    )


class Decoder(nn.Module):
    """Pixels of a map stand or fall together: each of 8 units owns 4 rows of fc."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 32)
        self.up1 = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.bn = nn.BatchNorm2d(6)
        self.up2 = nn.ConvTranspose2d(6, 3, 4, stride=2, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        maps = self.fc(z).relu().unflatten(1, (-1, 2, 2))
        return self.up2(self.bn(self.up1(maps)).relu()).sigmoid()


def grouped_transposed() -> nn.Module:
    """Layer 2 reads 2 groups of 4 and makes 2 groups of 6; layer 4 is depthwise and carries."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 12, 2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 12, 2, stride=2, groups=12),
        nn.Conv2d(12, 2, 1),
    )


class DepthwiseSeparable(nn.Module):
    """Depthwise layers only carry the units of what lies before them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 3, padding=1)
        self.depth = nn.Conv2d(10, 10, 3, padding=1, groups=10)
        self.point = nn.Conv2d(10, 7, 1)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.depth(self.conv(x).relu()).relu()
        return self.head(F.adaptive_avg_pool2d(self.point(h).relu(), 1).flatten(1))


def depthwise_multiplier() -> nn.Module:
    """Layer 2 makes maps 2k and 2k + 1 from map k: they belong to its unit."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 12, 3, groups=6),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 2, 1),
    )


class Grouped(nn.Module):
    """The k-th map of every group is one unit, before (12 in 2 groups) and after (16 in 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3)
        self.conv2 = nn.Conv2d(12, 16, 3, groups=2)
        self.bn = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.bn(self.conv2(self.conv1(x).relu())).relu())


class SuperResolution(nn.Module):
    """Pixel shuffle spreads maps 4k to 4k + 3 over the pixels of one: 24 maps are 6 units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 3, padding=1)
        self.expand = nn.Conv2d(10, 24, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.out = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.shuffle(self.expand(self.conv(x).relu())).relu())


class Unshuffled(nn.Module):
    """Each unit of conv1 owns 4 input channels of conv2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(20, 7, 3)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.pixel_unshuffle(self.conv1(x).relu(), 2)).relu()
        return self.head(h.mean((2, 3)))


class Interpolated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(self.up(self.conv1(x).relu())).relu()
        return self.conv3(F.interpolate(h, size=(4, 4), mode="nearest"))


class LastFlatten(nn.Module):
    """With the channels last, unit k owns columns k, k + 6, k + 12, ... of fc."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.fc = nn.Linear(54, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().permute(0, 2, 3, 1).flatten(1))


class ConvThenDense(nn.Module):
    """[B, C, T] becomes [B, T, C] between the two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 10, 3, padding=1)
        self.fc = nn.Linear(10, 7)
        self.out = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(self.conv(x).relu().permute(0, 2, 1)).relu().mean(1))


class BlurPool(nn.Module):
    """A depthwise convolution with a buffer, which is coupled."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 4, 3)
        self.register_buffer("kernel", torch.rand(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x).relu()
        return self.conv2(F.conv2d(h, self.kernel, stride=2, padding=1, groups=h.size(1)))


class SqueezeExcite(nn.Module):
    """The product unites map k of conv1 with unit k of up."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3)
        self.down = nn.Linear(12, 5)
        self.up = nn.Linear(5, 12)
        self.conv2 = nn.Conv2d(12, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x).relu()
        scale = self.up(self.down(h.mean((2, 3))).relu()).sigmoid()
        return self.conv2(h * scale[:, :, None, None])


class SpatialGate(nn.Module):
    """The gate's only map multiplies all maps: a unit alone is no group."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3)
        self.gate = nn.Conv2d(10, 1, 1)
        self.conv2 = nn.Conv2d(10, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x).relu()
        return self.conv2(h * self.gate(h).sigmoid())


class Video(nn.Module):
    """Frames go through the convolution as if they were examples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, stride=2)
        self.fc1 = nn.Linear(8, 10)
        self.fc2 = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, frames = x.shape[:2]
        h = self.conv(x.flatten(0, 1)).relu().mean((2, 3))
        return self.fc2(self.fc1(h.view(batch, frames, -1)).relu().mean(1))


IMAGE = tensors((3, 8, 8))
ENTRIES = (
    Entry("lenet", LeNet, tensors((1, 8, 8)), {"conv1": 6, "conv2": 10, "fc1": 14}),
    Entry("literal_view", LiteralView, IMAGE, {"conv": 6, "fc1": 11}, form="graph"),
    Entry("stored_channels", StoredChannels, IMAGE, {"conv": 12, "fc1": 10}),
    Entry("stored_decoy", StoredDecoy, IMAGE, {"conv": 12, "fc1": 10}),
    Entry("vgg", vgg, IMAGE, {"0": 6, "3": 8, "7": 10, "12": 14}),
    Entry("conv1d", conv1d, tensors((3, 8)), {"0": 7, "3": 9}),
    Entry("conv3d", conv3d, tensors((2, 4, 4, 4)), {"0": 5, "4": 7}),
    Entry("adaptive_pooling", adaptive_pooling, IMAGE, {"0": 9, "2": 7}),
    Entry("channel_prelu", channel_prelu, IMAGE, {"0": 9, "2": 7}),
    Entry("instance_norm", instance_norm, IMAGE, {"0": 9, "3": 7}),
    Entry("group_norm", group_norm, IMAGE, {"0": 3, "3": 10}),
    Entry("decoder", Decoder, tensors((5,)), {"fc": 8, "up1": 6}),
    Entry("grouped_transposed", grouped_transposed, IMAGE, {"0": 4, "2": 6}),
    Entry("depthwise_separable", DepthwiseSeparable, IMAGE, {"conv": 10, "point": 7}),
    Entry("depthwise_multiplier", depthwise_multiplier, IMAGE, {"0": 6}),
    Entry("grouped", Grouped, IMAGE, {"conv1": 6, "conv2": 8}),
    Entry("pixel_shuffle", SuperResolution, IMAGE, {"conv": 10, "expand": 6}),
    Entry("pixel_unshuffle", Unshuffled, IMAGE, {"conv1": 5, "conv2": 7}),
    Entry("interpolated", Interpolated, IMAGE, {"conv1": 8, "conv2": 6}),
    Entry("channels_last_flatten", LastFlatten, IMAGE, {"conv": 6}),
    Entry("conv_then_dense", ConvThenDense, tensors((3, 8)), {"conv": 10, "fc": 7}),
    Entry("blur_pool", BlurPool, IMAGE, {"conv1": 8}),
    Entry("squeeze_excite", SqueezeExcite, IMAGE, {"conv1": 12, "down": 5}),
    Entry("spatial_gate", SpatialGate, IMAGE, {"conv1": 10}),
    Entry("video", Video, tensors((3, 2, 8, 8)), {"conv": 8, "fc1": 10}),
)
