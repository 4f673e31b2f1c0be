"""Small networks to put gates on."""

import torch
from torch import Tensor, nn, tanh
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc


class Net(nn.Module):
    """A convolution, a batch norm and two dense layers."""

    sites = ("conv:out", "fc1:in", "fc2:in")

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.fc1 = nn.Linear(12, 8)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().flatten(1)
        return self.fc2(self.fc1(x).relu())

    def hidden(self, x: Tensor) -> Tensor:
        """A method that is not the forward."""
        return self.fc1(self.bn(self.conv(x)).relu().flatten(1))


class Segments(nn.Module):
    """Dense layers, each run plainly (-), or checkpointed, new (N) or reentrant (R)."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in plan)

    def forward(self, x: Tensor) -> Tensor:
        for kind, layer in zip(self.plan, self.layers, strict=True):
            if kind == "-":
                x = tanh(layer(x))
            else:
                x = checkpoint(lambda x, layer=layer: tanh(layer(x)), x, use_reentrant=kind == "R")
        return x


class Tied(nn.Module):
    """One weight, read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(tanh(self.first(x)))


class Scale(nn.Module):
    """Parameters of a class that the library has never heard of."""

    def __init__(self, units: int = 4) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.randn(units))
        self.unused = nn.Parameter(torch.randn(units))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used


class SelfAttention(nn.Module):
    """Torch's attention, which reads its projections as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Temperature(nn.Module):
    """A gate that learns its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(-0.4))

    def forward(self, log_alpha: Tensor) -> hc.HardConcrete:
        return hc.HardConcrete(log_alpha, self.raw.exp())
