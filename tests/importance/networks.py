"""Layers of every kind that re-fitting knows, with inputs half of which follow from the rest."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 8


class Raw(nn.Module):
    """One bare weight, and a function that multiplies by it."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class Attention(nn.Module):
    """Attention of a sequence to itself, or to another one."""

    def __init__(self, cross: bool = False, values: int | None = None) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(
            CHANNELS, 2, batch_first=True, kdim=values, vdim=values
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(1) if self.cross else x
        return self.attention(x, y, y, need_weights=False)[0]


@dataclass(frozen=True)
class Kind:
    """A layer and how its weight lies.

    Args:
        name: of the case.
        build: makes the layer.
        shape: of the inputs of one example.
        channel: which dimension of that holds the channels.
        weight: the parameter to prune.
        dim: its dimension that reads the channels.
        groups: of the channels; the last half of each follows from the first.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    channel: int = 0
    weight: str = "weight"
    dim: int = 1
    groups: int = 1

    def batches(self, number: int = 3, size: int = 24) -> list[Tensor]:
        """Inputs in float64, whose channels are linear combinations of half of them."""
        part = CHANNELS // self.groups // 2
        mix = torch.randn(part, part, dtype=torch.float64)
        batches = []
        for _ in range(number):
            x = torch.randn(size, *self.shape, dtype=torch.float64).movedim(self.channel + 1, -1)
            x = x.unflatten(-1, (self.groups, -1)).clone()
            if part:
                x[..., part:] = x[..., :part] @ mix
            batches.append(x.flatten(-2).movedim(-1, self.channel + 1).contiguous())
        return batches

    def prune(self, model: nn.Module) -> None:
        """Zero what reads the second half of the channels; what is kept is disturbed."""
        weight = model.get_parameter(self.weight)
        with torch.no_grad():
            weight.mul_(1 + 0.1 * torch.rand_like(weight))
            if (part := CHANNELS // self.groups // 2) == 0:
                return
            if weight.shape[self.dim] == CHANNELS:
                reads = torch.arange(CHANNELS) % (2 * part) >= part
            else:
                reads = torch.arange(weight.shape[self.dim]) >= part
            weight.index_fill_(self.dim, reads.nonzero().flatten(), 0.0)


def _convolution(name: str, rank: int = 2, length: int = 7, **settings: object) -> Kind:
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d
    groups = settings.get("groups", 1)
    assert isinstance(groups, int)

    def build() -> nn.Module:
        options: dict[str, object] = {"kernel_size": 3, **settings}
        return kinds[rank - 1](CHANNELS, CHANNELS, **options)

    return Kind(name, build, (CHANNELS, *[length] * rank), groups=groups)


def _transposed(name: str, rank: int = 2, **settings: object) -> Kind:
    kinds = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    groups = settings.get("groups", 1)
    assert isinstance(groups, int)

    def build() -> nn.Module:
        options: dict[str, object] = {"kernel_size": 3, **settings}
        return kinds[rank - 1](CHANNELS, 4, **options)

    return Kind(name, build, (CHANNELS, *[5] * rank), dim=0, groups=groups)


LAST = {"shape": (6, CHANNELS), "channel": 1}

KINDS: tuple[Kind, ...] = (
    Kind("dense", lambda: nn.Linear(CHANNELS, 5), (CHANNELS,)),
    Kind("dense, a sequence", lambda: nn.Linear(CHANNELS, 5), **LAST),
    Kind("dense, no bias", lambda: nn.Linear(CHANNELS, 5, bias=False), (CHANNELS,)),
    Kind("F.linear", lambda: Raw(F.linear, 5, CHANNELS), (CHANNELS,)),
    Kind("x @ W", lambda: Raw(lambda x, w, _: x @ w, CHANNELS, 5), dim=0, **LAST),
    Kind("x @ W.T", lambda: Raw(lambda x, w, b: x @ w.T + b, 5, CHANNELS), **LAST),
    Kind("matmul", lambda: Raw(lambda x, w, _: torch.matmul(input=x, other=w), CHANNELS, 5),
         dim=0, **LAST),
    Kind("mm", lambda: Raw(lambda x, w, _: torch.mm(x, mat2=w), CHANNELS, 5), (CHANNELS,), dim=0),
    Kind("addmm", lambda: Raw(lambda x, w, b: torch.addmm(b, x, w), CHANNELS, 5), (CHANNELS,),
         dim=0),
    Kind("addmm by name",
         lambda: Raw(lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w), CHANNELS, 5),
         (CHANNELS,), dim=0),
    Kind("attention", Attention, weight="attention.in_proj_weight", **LAST),
    Kind("cross attention", lambda: Attention(cross=True), weight="attention.in_proj_weight",
         **LAST),
    _convolution("conv1d", 1, bias=False),
    _convolution("conv2d"),
    _convolution("conv3d", 3, length=4),
    _convolution("strided", stride=(2, 3), padding=1),
    _convolution("dilated", dilation=(2, 1), padding=(2, 0)),
    _convolution("same padding", kernel_size=(4, 3), dilation=(1, 2), padding="same"),
    _convolution("valid padding", padding="valid"),
    _convolution("reflected padding", padding=2, padding_mode="reflect"),
    _convolution("circular padding", padding=1, padding_mode="circular"),
    _convolution("grouped", groups=2, padding=1),
    _convolution("depthwise", groups=CHANNELS, padding=1),
    _transposed("transposed 1d", 1, stride=2),
    _transposed("transposed 2d", stride=2, padding=1, output_padding=1),
    _transposed("transposed 3d", 3, bias=False),
    _transposed("transposed, dilated", stride=(1, 2), dilation=2, padding=3),
    _transposed("transposed, grouped", stride=2, groups=2),
)  # fmt: skip


class Residual(nn.Module):
    """A stem, a block with norms and a shortcut, and a classifier."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x)).relu()
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out))
        out += x
        return self.fc(out.relu().mean((2, 3)))


def varied(model: nn.Module) -> nn.Module:
    """In float64 and in evaluation, with norms that do something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor, 0.5, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.double().eval()


def call(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that only calls the model."""
    return model(x).sum()
