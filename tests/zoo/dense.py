"""Dense layers, and what can lie between them; several inputs and outputs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)
    )


def frozen_mlp() -> nn.Module:
    """Nothing of the first layer learns; its units can go all the same."""
    model = mlp()
    model[0].requires_grad_(False)
    return model


def bias_free_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 11, bias=False),
        nn.BatchNorm1d(11),
        nn.ReLU(),
        nn.Linear(11, 9, bias=False),
        nn.BatchNorm1d(9, affine=False),
        nn.GELU(),
        nn.Linear(9, 4, bias=False),
    )


def prelu_mlp() -> nn.Module:
    """A slope for each unit is coupled to it; one slope for all units is not."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.PReLU(12), nn.Linear(12, 10), nn.PReLU(), nn.Linear(10, 4)
    )


def dropout_net() -> nn.Module:
    """The only network that is random in training."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(180, 8),
        nn.ELU(),
        nn.Dropout(0.1),
        nn.Linear(8, 4),
    )


def layer_norm_mlp() -> nn.Module:
    """Layer norm reads all 12 units together, so they are fixed; the 10 after it are not."""
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.LayerNorm(12),
        nn.ReLU(),
        nn.Linear(12, 10),
        nn.ReLU(),
        nn.Linear(10, 4),
    )


class Maxout(nn.Module):
    """The larger of two: units 2k and 2k + 1 of fc1 are one, since no pair may lose a member."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).unflatten(1, (-1, 2)).amax(2))


class CReLU(nn.Module):
    """Both signs of a unit: it owns columns k and 9 + k of fc2."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 9)
        self.fc2 = nn.Linear(18, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(torch.cat([h.relu(), (-h).relu()], dim=1))


class Flipped(nn.Module):
    """Reversing the order of the units commutes with removing some."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 9)
        self.fc2 = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu().flip(1))


class GLU(nn.Module):
    """Unit k of fc1 owns row k of the values and row 9 + k of the gates."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 18)
        self.fc2 = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.glu(self.fc1(x), dim=-1))


class SwiGLU(nn.Module):
    """The product unites unit k of w1 and of w3."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(6, 14, bias=False)
        self.w3 = nn.Linear(6, 14, bias=False)
        self.w2 = nn.Linear(14, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedSwiGLU(nn.Module):
    """As SwiGLU, with one layer for both halves; the halves stay equal when units go."""

    def __init__(self) -> None:
        super().__init__()
        self.w12 = nn.Linear(6, 22)
        self.w3 = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class BufferScale(nn.Module):
    """A buffer multiplied in is coupled: it is sliced with the units."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.fc2 = nn.Linear(12, 4)
        self.register_buffer("scale", torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu() * self.scale)


class InputScale(nn.Module):
    """An input as wide as fc1 fixes its units; one that is broadcast over fc2 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.fc2 = nn.Linear(12, 9)
        self.fc3 = nn.Linear(9, 4)

    def forward(self, x: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
        h = self.fc1(x).relu() * wide
        return self.fc3(self.fc2(h).relu() * narrow)


class DictInDictOut(nn.Module):
    """Both heads read the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.label = nn.Linear(12, 4)
        self.side = nn.Linear(12, 7)
        self.box = nn.Linear(7, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        h = (self.trunk(batch["features"]) * batch["weight"]).relu()
        return {"label": self.label(h), "more": {"box": self.box(self.side(h).relu())}}


class AddedTowers(nn.Module):
    """The sum unites unit k of both towers; the first one run gives the name."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.right = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.left(a) + self.right(b)).relu())


class JoinedTowers(nn.Module):
    """Joined towers keep their own units; the second one is a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 12)
        self.right = nn.Linear(5, 8)
        self.head = nn.Linear(20, 3)

    def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a).relu(), self.right(b).tanh()], dim=-1))


class TupleOutput(nn.Module):
    """What is returned is fixed: all of fc2, which is an output and is read by fc3 too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.fc2 = nn.Linear(12, 10)
        self.fc3 = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.fc2(self.fc1(x).relu())
        return self.fc3(features.relu()), features


def joined_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 6),), {"b": torch.randn(batch, 5)}


def dict_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ({"features": torch.randn(batch, 6), "weight": torch.rand(batch, 1)},), {}


ENTRIES = (
    Entry("mlp", mlp, tensors((6,)), {"0": 12, "2": 10}),
    Entry("frozen_mlp", frozen_mlp, tensors((6,)), {"0": 12, "2": 10}),
    Entry("bias_free_mlp", bias_free_mlp, tensors((6,)), {"0": 11, "3": 9}),
    Entry("prelu_mlp", prelu_mlp, tensors((6,)), {"0": 12, "2": 10}),
    Entry("dropout_net", dropout_net, tensors((3, 8, 8)), {"0": 5, "4": 8}),
    Entry("layer_norm_mlp", layer_norm_mlp, tensors((6,)), {"3": 10}, ("layer_norm",)),
    Entry("maxout", Maxout, tensors((6,)), {"fc1": 8}),
    Entry("crelu", CReLU, tensors((6,)), {"fc1": 9}),
    Entry("flipped", Flipped, tensors((6,)), {"fc1": 9}),
    Entry("glu", GLU, tensors((6,)), {"fc1": 9}),
    Entry("swiglu", SwiGLU, tensors((6,)), {"w1": 14}),
    Entry("fused_swiglu", FusedSwiGLU, tensors((6,)), {"w12": 11}),
    Entry("buffer_scale", BufferScale, tensors((6,)), {"fc1": 12}),
    Entry("input_scale", InputScale, tensors((6,), (12,), (1,)), {"fc2": 9}, ("input",)),
    Entry("dict_in_dict_out", DictInDictOut, dict_inputs, {"trunk": 12, "side": 7}),
    Entry("added_towers", AddedTowers, tensors((6,), (5,)), {"left.0": 12, "left.2": 8}),
    Entry("joined_towers", JoinedTowers, joined_inputs, {"left": 12, "right": 8}),
    Entry("tuple_output", TupleOutput, tensors((6,)), {"fc1": 12}, ("output",)),
)
