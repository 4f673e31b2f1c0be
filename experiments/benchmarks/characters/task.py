"""The text, the GPT, and its training."""

import gzip
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc


@dataclass(frozen=True)
class Size:
    """Layers, the width between them, heads, features of all heads, and the feed-forward width."""

    layers: int
    width: int
    heads: int
    attention: int
    hidden: int
    length: int
    batch: int
    dropout: float
    lr: float


SIZES = {
    "small": Size(3, 96, 6, 96, 384, length=64, batch=32, dropout=0.0, lr=3e-3),
    "gpt2": Size(12, 768, 12, 768, 3072, length=256, batch=32, dropout=0.2, lr=3e-4),
}


class Block(nn.Module):
    """Causal attention, then a feed-forward network, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.attention)
        self.out = nn.Linear(size.attention, size.width)
        self.up, self.down = (
            nn.Linear(size.width, size.hidden),
            nn.Linear(size.hidden, size.width),
        )
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The next states, [batch, length, width]."""
        heads = (
            part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        q, k, v = (part.transpose(1, 2) for part in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Logits of the next character at each position."""

    def __init__(self, characters: int, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """From [batch, length] to [batch, length, characters]."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.characters(text) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class Text:
    """The characters as numbers, and batches of them."""

    def __init__(self, file: Path, size: Size, device: torch.device) -> None:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
        self.alphabet = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        data = torch.tensor([numbers[character] for character in text])
        self.train, self.test = (
            part.to(device) for part in data.tensor_split([len(data) * 9 // 10])
        )
        self.size, self.device = size, device

    def batch(self, data: Tensor, generator: torch.Generator) -> Tensor:
        """Excerpts, [batch, length + 1]."""
        reach = self.size.length + 1
        starts = torch.randint(len(data) - reach, (self.size.batch, 1), generator=generator)
        return data[(starts + torch.arange(reach)).to(self.device)]

    def batches(self, data: Tensor, number: int, seed: int) -> list[Tensor]:
        """As many batches; the same for every method."""
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(data, generator) for _ in range(number)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Nats for a character."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def test_loss(self, model: nn.Module) -> float:
        """Of 100 batches of the last tenth."""
        model.eval()
        batches = self.batches(self.test, 100, seed=10**6)
        return sum(self.loss(model, batch).item() for batch in batches) / len(batches)

    @torch.no_grad()
    def write(self, model: nn.Module, characters: int = 200) -> str:
        """A text by the model."""
        model.eval()
        generator, text = torch.Generator().manual_seed(0), self.test[None, :1]
        for _ in range(characters):
            logits = model(text[:, -self.size.length :])[0, -1].double().cpu()
            drawn = torch.multinomial(logits.softmax(0), 1, generator=generator)
            text = torch.cat([text, drawn[None].to(self.device)], 1)
        return "".join(self.alphabet[number] for number in text[0].tolist())


def train(
    model: nn.Module, text: Text, steps: int, seed: int, budget: hc.Budget | None = None
) -> nn.Module:
    """AdamW with a warm-up and a cosine. A budget shrinks the model when it has settled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=text.size.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, text.size.lr, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        value = text.loss(model, text.batch(text.train, generator))
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if budget is not None and isinstance(model, hc.GatedModel):
            settled = budget.settled
            budget.step()
            if budget.settled and not settled:
                hc.shrink(model, optimizer)
    return model


def narrow(characters: int, size: Size, fraction: float, example: Tensor) -> GPT:
    """As wide as fits into a fraction of the multiply-adds; the feed-forward width takes the rest.

    It has as many layers and heads as the dense model.
    """

    def build(width: int, hidden: int) -> GPT:
        return GPT(characters, replace(size, width=width, attention=width, hidden=hidden))

    def fits(width: int, hidden: int) -> bool:
        with torch.device("meta"):
            return hc.count(build(width, hidden), example.to("meta")).macs <= limit

    with torch.device("meta"):
        limit = fraction * hc.count(build(size.width, size.hidden), example.to("meta")).macs
    width = max(w for w in range(size.heads, size.width + 1, size.heads) if fits(w, 4 * w))
    hidden = next(h for h in range(4 * width, 8 * width) if not fits(width, h + 1))
    return build(width, hidden)
