"""Blocks with statistics over channels or over weights: what they read stays, the rest can go."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors


class ResponseNorm(nn.Module):
    """The global response norm of ConvNeXt-V2: each channel relative to the mean of all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(channels))
        self.beta = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(dim=(1, 2), keepdim=True)
        return self.gamma * (x * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.beta + x


class ConvNeXtBlock(nn.Module):
    """Depthwise, norm, a wide layer with a response norm, and back."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, wide), nn.Linear(wide, channels)
        self.response = ResponseNorm(wide)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(self.response(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Layer norms fix the 6 channels, the response norm the 14; the last layers have 9 units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 6, 2, stride=2), ConvNeXtBlock(6, 14)
        self.wide, self.head = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.wide(self.block(self.stem(x)).mean((2, 3)))))


class StandardConv(nn.Conv2d):
    """The weights of each output map have mean 0 and variance 1, as in NFNet."""

    def __init__(self, channels: int, out: int, size: int, **settings: int) -> None:
        super().__init__(channels, out, size, **settings)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.randn(out, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        deviation = self.weight.var((1, 2, 3), keepdim=True, unbiased=False).add(1e-4).sqrt()
        weight = self.gain * (self.weight - mean) / deviation
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NormFree(nn.Module):
    """A block of NFNet: a standardised layer keeps what it reads, so only the last maps go."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1, self.conv2 = StandardConv(6, 8, 1), StandardConv(8, 6, 3, padding=1)
        self.squeeze, self.excite = nn.Linear(6, 5), nn.Linear(5, 6)
        self.last, self.head = StandardConv(6, 10, 1), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.conv2(F.gelu(self.conv1(F.gelu(x))))
        gate = self.excite(F.relu(self.squeeze(h.mean((2, 3))))).sigmoid()
        x = x + 0.2 * h * gate[..., None, None]
        return self.head(F.gelu(self.last(x)).mean((2, 3)))


IMAGE = tensors((3, 8, 8))
ENTRIES = [
    Entry(
        "response_norm",
        ConvNeXt,
        IMAGE,
        {"wide": 9},
        ("mean reads all of them (mean in block.response)", "layer_norm"),
    ),
    Entry(
        "standardised_weights",
        NormFree,
        IMAGE,
        {"squeeze": 5, "last.gain": 10},
        ("mean reads all of them (mean)",),
    ),
]
