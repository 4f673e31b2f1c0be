"""A small transformer over characters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardconcrete.errors import ArgumentError

DEVIATION = 0.02
"""Of the initial weights, as in GPT-2."""


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.head_width = width // heads

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and to earlier positions."""
        query, key, value = (
            layer(x).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a feed-forward layer; a norm before each, a sum after each."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """The next stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))  # type: ignore[no-any-return]


class CharTransformer(nn.Module):
    """Scores of the next character at every position of a text.

    Args:
        vocabulary: how many different characters there are.
        width: of the stream.
        layers: how many blocks.
        heads: of each attention; they share the width.
        context: longest text.
        hidden: width of the feed-forward layers.

    Example:
        >>> import torch
        >>> CharTransformer(65, layers=1)(torch.zeros(2, 16, dtype=torch.long)).shape
        torch.Size([2, 16, 65])
    """

    def __init__(
        self,
        vocabulary: int,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ArgumentError(f"{heads} heads cannot share a width of {width}")
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=DEVIATION)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Scores [N, length, vocabulary] of characters [N, length]."""
        places = self.places(torch.arange(text.shape[1], device=text.device))
        return self.fc(self.norm(self.blocks(self.characters(text) + places)))  # type: ignore[no-any-return]
