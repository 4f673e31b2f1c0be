"""A transformer that is built from one object with its sizes, as those of Hugging Face are."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Part:
    """Sizes inside another object."""

    inner: int = 24


@dataclass(frozen=True)
class Settings:
    """The sizes."""

    width: int = 16
    layers: int = 2
    heads: int = 4
    head_dim: int | None = None
    part: Part = field(default_factory=Part)
    limit: int | None = None


class Attention(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.size = settings.head_dim or settings.width // settings.heads
        self.num_heads = settings.heads
        self.qkv = nn.Linear(settings.width, 3 * self.num_heads * self.size)
        self.out = nn.Linear(self.num_heads * self.size, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ReadingAttention(Attention):
    """Its forward reads the number of heads from the settings, which all layers share."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        size = self.settings.heads * self.size
        parts = self.qkv(x)[..., :size], self.qkv(x)[..., size : 2 * size]
        parts = *parts, self.qkv(x)[..., 2 * size :]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    attention_kind = Attention

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.attention = self.attention_kind(settings)
        self.up = nn.Linear(settings.width, settings.part.inner)
        self.down = nn.Linear(settings.part.inner, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


class ReadingBlock(Block):
    attention_kind = ReadingAttention


class Network(nn.Module):
    block_kind = Block

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.blocks = nn.ModuleList(self.block_kind(settings) for _ in range(settings.layers))
        self.head = nn.Linear(settings.width, 5)
        self.files: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def save_pretrained(self, folder: str) -> None:
        self.files.append(folder)


class Reading(Network):
    """Its layers read the settings in their forwards."""

    block_kind = ReadingBlock


class Scaled(Network):
    """One of its numbers is more than a size."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.scale = settings.part.inner**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Wrapped(nn.Module):
    """The configuration belongs to a part of the model."""

    def __init__(self, body: nn.Module, classes: int) -> None:
        super().__init__()
        self.body, self.last = body, nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def network(kind: Any = Network, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return kind(Settings(**sizes)).double()


def x(rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, 16, dtype=torch.float64)


HEADS = ("blocks.0.attention", "blocks.1.attention")
WIDTHS = ("blocks.0.up", "blocks.1.up")
