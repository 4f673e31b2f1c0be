"""Small networks to make smaller, and gates with known values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hardconcrete as hc
from tests.exactness import apart, outputs


class Maps(nn.Module):
    """Convolutions, one of them depthwise, norms, slopes and a buffer, then dense layers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3)
        self.bn = nn.BatchNorm2d(6)
        self.slope = nn.PReLU(6)
        self.depth = nn.Conv2d(6, 6, 3, groups=6)
        self.conv2 = nn.Conv2d(6, 5, 1)
        self.instance = nn.InstanceNorm2d(5)
        self.fc1 = nn.Linear(20, 7)
        self.fc2 = nn.Linear(7, 3)
        self.register_buffer("scale", torch.rand(5, 1, 1) + 0.5)
        for tensor in (self.bn.weight, self.bn.bias, self.bn.running_mean, self.bn.running_var):
            tensor.data.uniform_(0.5, 1.5)
        self.slope.weight.data.uniform_(0.1, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depth(self.slope(self.bn(self.conv1(x))))
        x = self.instance(self.conv2(x)) * self.scale
        return self.fc2(self.fc1(x.relu().flatten(1)).relu())

    @staticmethod
    def example(batch: int = 3) -> Tensor:
        return torch.randn(batch, 2, 6, 6)


class Joined(nn.Module):
    """Two layers joined, and one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 5)
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x).relu(), self.right(x).tanh()], dim=1))


class TiedWords(nn.Module):
    """An embedding whose weight is also that of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 9, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.words(x) + self.mix(self.words(x)).relu())


class Sized(nn.Module):
    """A size is written into the forward, so that no smaller tensors fit it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.bn = nn.BatchNorm2d(6)
        self.fc1 = nn.Linear(24, 5)
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().view(-1, 24)
        return self.fc2(self.fc1(x).relu())

    @staticmethod
    def example(batch: int = 3) -> Tensor:
        return torch.randn(batch, 1, 4, 4)


class Averaged(nn.Module):
    """Cut tensors fit this forward, and it then divides by another number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h / h.shape[1])


def dense() -> nn.Sequential:
    """Three dense layers."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def with_shut(gated: hc.GatedModel, shut: Mapping[str, Sequence[int]]) -> hc.GatedModel:
    """These units shut; of the others some are fully open and some in between."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        gated.gates.log_alpha.uniform_(-1.0, 4.0, generator=generator)
        for group in gated.groups:
            own = list(shut.get(group.name, ()))
            gated.gates.log_alpha[group.slice][own] = -9.0
    assert {name: (z == 0).nonzero().flatten().tolist()
            for name, z in gated.gate_values().items() if (z == 0).any()} == {
            name: sorted(units) for name, units in shut.items() if len(units)}  # fmt: skip
    return gated


def at_random(gated: hc.GatedModel, seed: int = 0) -> hc.GatedModel:
    """Gates shut, open and in between."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        gated.gates.log_alpha.normal_(0, 3.0, generator=generator)
    return gated


def gap(gated: hc.GatedModel, small: nn.Module, *args: Any) -> float:
    """Largest difference in evaluation, as a part of the output's scale."""
    modes = gated.training, small.training
    gated.eval(), small.eval()
    try:
        return apart(outputs(gated, (args, {})), outputs(small, (args, {})))
    finally:
        gated.train(modes[0]), small.train(modes[1])
