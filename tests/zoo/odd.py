"""Units that an operator reads together, a graph within the graph, models that cannot be traced."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo.entry import Entry, Inputs, tensors


class Fixing(nn.Module):
    """The operator `between` fixes the units of conv1; those of conv2 are free."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 9, 3)
        self.fc = nn.Linear(9, 4)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self.conv1(x).relu())
        return self.fc(self.conv2(h).relu().mean((2, 3)))


class SoftmaxGate(Fixing):
    def between(self, h: Tensor) -> Tensor:
        return h * h.softmax(1)


class SpatialAttention(Fixing):
    """The mean over all maps changes when one of them goes."""

    def between(self, h: Tensor) -> Tensor:
        return h * h.mean(1, keepdim=True).sigmoid()


class Running(Fixing):
    def between(self, h: Tensor) -> Tensor:
        return h.cumsum(1)


class Sorted(Fixing):
    def between(self, h: Tensor) -> Tensor:
        return h.sort(1).values


class Spectrum(Fixing):
    """An operator that is linear, and still reads all units for each result."""

    def between(self, h: Tensor) -> Tensor:
        return torch.fft.fft(h, dim=1).real


class LocalResponse(Fixing):
    """Each map is divided by its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.response = nn.LocalResponseNorm(3)

    def between(self, h: Tensor) -> Tensor:
        return self.response(h)


class NeighbourAttention(Fixing):
    """ECA: a convolution along the maps, for which they are places and not channels."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def between(self, h: Tensor) -> Tensor:
        weight = self.along(h.mean((2, 3)).unsqueeze(1)).sigmoid()
        return h * weight.squeeze(1)[:, :, None, None]


class SingularValues(nn.Module):
    """An operator that no rule knows, over the units of fc1; those of fc2 are free."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 8)
        self.fc2 = nn.Linear(4, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc2(torch.linalg.svdvals(self.fc1(x).relu())).relu())


class Gram(nn.Module):
    """Products of activations with activations: places 6j + k of the result are not units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.fc1 = nn.Linear(36, 11)
        self.fc2 = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu().flatten(2)
        return self.fc2(self.fc1((h @ h.transpose(1, 2)).flatten(1)).relu())


class FrozenTrunk(nn.Module):
    """A trunk without gradients, which the trace holds in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.conv2 = nn.Conv2d(8, 10, 3)
        self.fc1 = nn.Linear(10, 7)
        self.fc2 = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.conv2(self.conv1(x).relu()).relu().mean((2, 3))
        return self.fc2(self.fc1(h).relu())


class Branching(nn.Module):
    """Runs another layer, depending on what the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.other = nn.Linear(6, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x) if x.sum() > 0 else self.other(x)
        return self.fc2(h.relu())


class Pondering(nn.Module):
    """Repeats a layer as often as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.step = nn.Linear(12, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        for _ in range(int(x.abs().max()) + 1):
            h = self.step(h).relu()
        return self.fc2(h)


class ThroughNumpy(nn.Module):
    """Leaves torch, where no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).relu()
        return self.fc2(h * torch.from_numpy(h.detach().numpy()))


IMAGE = tensors((3, 8, 8))
ENTRIES = (
    Entry("softmax_gate", SoftmaxGate, IMAGE, {"conv2": 9}, ("softmax",)),
    Entry("spatial_attention", SpatialAttention, IMAGE, {"conv2": 9}, ("mean",)),
    Entry("running", Running, IMAGE, {"conv2": 9}, ("cumsum",)),
    Entry("sorted", Sorted, IMAGE, {"conv2": 9}, ("sort",)),
    Entry("spectrum", Spectrum, IMAGE, {"conv2": 9}, ("fft",)),
    Entry("local_response", LocalResponse, IMAGE, {"conv2": 9}, ("response",)),
    Entry("neighbour_attention", NeighbourAttention, IMAGE, {"conv2": 9}, ("conv1d",)),
    Entry("singular_values", SingularValues, tensors((4, 5)), {"fc2": 10}, ("svd",)),
    Entry("gram", Gram, IMAGE, {"fc1": 11}, ("other units lie along the same dimension",)),
    Entry("frozen_trunk", FrozenTrunk, IMAGE, {"conv1": 8, "conv2": 10, "fc1": 7}),
)

REFUSED: tuple[tuple[str, Callable[[], nn.Module], Inputs, str], ...] = (
    ("branching", Branching, tensors((6,)), "data-dependent"),
    ("pondering", Pondering, tensors((6,)), "data-dependent"),
    ("through_numpy", ThroughNumpy, tensors((6,)), "numpy"),
)
