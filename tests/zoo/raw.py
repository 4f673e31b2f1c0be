"""Parameters without a layer of their own, and parameters that are read more than once."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.entry import Entry, tensors


class RawLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(12, 6))
        self.b1 = nn.Parameter(torch.randn(12))
        self.w2 = nn.Parameter(torch.randn(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.w1, self.b1).relu(), self.w2)


class RawMatmul(nn.Module):
    """[in, out], its transpose, and the bias within addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(6, 12))
        self.w2 = nn.Parameter(torch.randn(10, 12))
        self.b3 = nn.Parameter(torch.randn(9))
        self.w3 = nn.Parameter(torch.randn(10, 9))
        self.w4 = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.w1).relu() @ self.w2.t()
        return torch.addmm(self.b3, h.tanh(), self.w3).relu().matmul(self.w4)


class RawEinsum(nn.Module):
    """On [batch, time, features]; the second one sums over time and units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(5, 12))
        self.w2 = nn.Parameter(torch.randn(12, 10))
        self.w3 = nn.Parameter(torch.randn(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bti,io->bto", x, self.w1).relu()
        h = torch.einsum("bti,io->bo", h, self.w2).relu()
        return torch.einsum("bi,oi->bo", h, self.w3)


class Experts(nn.Module):
    """Stacked weights of 3 experts: unit k is the k-th one of every expert.

    The experts themselves are fixed by the softmax that mixes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.w1 = nn.Parameter(torch.randn(3, 6, 9))
        self.b1 = nn.Parameter(torch.randn(3, 9))
        self.w2 = nn.Parameter(torch.randn(3, 9, 4))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        h = (torch.einsum("bi,eio->beo", x, self.w1) + self.b1).relu()
        return torch.einsum("be,bej->bj", share, torch.einsum("beo,eoj->bej", h, self.w2))


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(7, 3, 3, 3))
        self.bias = nn.Parameter(torch.randn(7))
        self.second = nn.Parameter(torch.randn(4, 7, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv2d(x, self.first, self.bias, padding=1).relu()
        return F.conv2d(h, self.second)


class RawConv(nn.Module):
    """Raw parameters of a module within the module."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Kernels()

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels(x).mean((2, 3))


class Dense(nn.Module):
    """Three dense layers, to be parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 10)
        self.fc2 = nn.Linear(10, 12)
        self.fc3 = nn.Linear(12, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc3(self.fc2(self.fc1(x).relu()).relu()).relu())


def weight_norm() -> nn.Module:
    """A row of fc2 is divided by its norm over the units of fc1, which are therefore fixed.

    Rows do not mix: the units of fc2 can go.
    """
    model = Dense()
    parametrizations.weight_norm(model.fc2)
    return model


def spectral_norm() -> nn.Module:
    """The largest singular value of fc2 depends on all its rows and columns: only fc3 is free."""
    model = Dense()
    parametrizations.spectral_norm(model.fc2)
    return model


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


def positive_weights() -> nn.Module:
    """A pointwise parametrization of a layer whose inputs are fixed: its rows are units."""
    model = Dense()
    parametrize.register_parametrization(model.fc1, "weight", Positive())
    return model


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's transpose, so unit k owns row k and its bias, and no column."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(9, 7)
        self.bias = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).relu(), self.encoder.weight.t(), self.bias)


class TiedLayers(nn.Module):
    """Columns of the tied weight read inp's units and first's, so these are the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.inp(x).relu()).tanh()).relu())


class Reused(nn.Module):
    """A layer applied to what it made itself: its rows and its columns are the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.shared = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for _ in range(3):
            h = self.shared(h.relu())
        return self.out(h)


class ReusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.block = nn.Sequential(nn.Linear(8, 14), nn.ReLU(), nn.Linear(14, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for _ in range(2):
            h = h + self.block(h)
        return self.out(h)


class SharedSlopes(nn.Module):
    """One set of slopes after both layers makes their units the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 8)
        self.fc2 = nn.Linear(8, 8)
        self.slopes = nn.PReLU(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.slopes(self.fc2(self.slopes(self.fc1(x)))))


class Siamese(nn.Module):
    """One encoder, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh())
        self.out = nn.Linear(8, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out((self.encoder(a) - self.encoder(b)).abs())


ROWS = tensors((6,))
ENTRIES = (
    Entry("raw_linear", RawLinear, ROWS, {"w1": 12}),
    Entry("raw_matmul", RawMatmul, ROWS, {"w1": 12, "w2": 10, "w3": 9}),
    Entry("raw_einsum", RawEinsum, tensors((4, 5)), {"w1": 12, "w2": 10}),
    Entry("experts", Experts, ROWS, {"w1": 9}, ("softmax",)),
    Entry("raw_conv", RawConv, tensors((3, 8, 8)), {"kernels.first": 7}),
    Entry("weight_norm", weight_norm, ROWS, {"fc2": 12, "fc3": 8}, ("weight_norm",)),
    Entry("spectral_norm", spectral_norm, ROWS, {"fc3": 8}, ("fc2",)),
    Entry("positive_weights", positive_weights, ROWS, {"fc1": 10, "fc2": 12, "fc3": 8}),
    Entry("tied_autoencoder", TiedAutoencoder, tensors((9,)), {"encoder": 7}),
    Entry("tied_layers", TiedLayers, tensors((5,)), {"inp": 8}),
    Entry("reused", Reused, tensors((5,)), {"inp": 8}),
    Entry("reused_block", ReusedBlock, tensors((5,)), {"inp": 8, "block.0": 14}),
    Entry("shared_slopes", SharedSlopes, tensors((5,)), {"fc1": 8}),
    Entry("siamese", Siamese, tensors((6,), (6,)), {"encoder.0": 12, "encoder.2": 8}),
)
