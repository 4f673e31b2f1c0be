"""Attention as people write it: the units are its heads, in whatever layout they come.

Each network has a residual stream of fixed width around one attention layer without a module of
its own, so the heads have the name of the layer that makes them first.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors

WIDTH, HEADS, SIZE = 20, 5, 4


class Attending(nn.Module):
    """Five heads of four features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.inp = nn.Linear(5, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.add_projections()
        self.o = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def add_projections(self) -> None:
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def heads(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))

    def mix(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x, x))
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        h = h + self.o(self.mix(self.norm1(h)))
        return self.out(self.norm2(h).flatten(1, -2).mean(1))


class Manual(Attending):
    """A causal mask made in the forward, and a softmax by hand."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous().view(x.shape[0], x.shape[1], -1)


class NanoGPT(Attending):
    """A fused projection, split by width; the head's size is written as a quotient."""

    bias: Tensor

    def add_projections(self) -> None:
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.n_embd, self.n_head = WIDTH, HEADS
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, 8, 8)))

    def mix(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(self.bias[:, :, :time, :time] == 0, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(batch, time, width)


class Chunked(Attending):
    """One projection in three chunks, with a boolean mask."""

    def add_projections(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class Unbound(Chunked):
    """[batch, time, 3, heads, size], as in vision transformers."""

    def mix(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], 3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * self.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


class HeadMajor(Chunked):
    """[batch, time, heads, 3 size], as in GPT-NeoX."""

    def mix(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], self.num_heads, 3 * self.head_dim)
        q, k, v = parts.transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        return mixed.transpose(1, 2).flatten(2)


class Einsum(Attending):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.q, self.k, self.v))
        weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)


class EinsumWeights(Attending):
    """Weights of three dimensions: heads and the values' features are units."""

    def add_projections(self) -> None:
        shape = (HEADS, WIDTH, SIZE)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape) / 4) for _ in range(3))
        self.last = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) / 4)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,hcd->bhtd", x, w) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bhtd,hdo->bto", mixed, self.last)


class Grouped(Attending):
    """Ten query heads of two features on five heads of keys and values."""

    def add_projections(self) -> None:
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(1, 2)

    def mix(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x, x), enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class Expanded(Grouped):
    """The same, with the copies made by expand."""

    def copies(self, x: Tensor) -> Tensor:
        batch, heads, time, size = x.shape
        return x[:, :, None].expand(batch, heads, 2, time, size).reshape(batch, -1, time, size)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        mixed = F.scaled_dot_product_attention(q, self.copies(k), self.copies(v))
        return mixed.transpose(1, 2).flatten(2)


class OneKeyHead(Attending):
    """All query heads share one head of keys and values, which stays."""

    def add_projections(self) -> None:
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SIZE)

    def mix(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class CrossAttention(Attending):
    """Keys and values from a second input."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inp(x)
        mixed = F.scaled_dot_product_attention(*self.heads(self.norm1(h), y))
        return self.out(self.norm2(h + self.o(mixed.transpose(1, 2).flatten(2))).mean(1))


class Rotary(Attending):
    """Buffers of a head's size, which all heads share: they keep it."""

    cos: Tensor
    sin: Tensor

    def add_projections(self) -> None:
        super().add_projections()
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Halves."""
        cos, sin = (torch.cat([t, t], -1)[: x.shape[2]] for t in (self.cos, self.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class RotaryPairs(Rotary):
    """Interleaved, with angles from frequencies and positions."""

    def rotate(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], dtype=x.dtype)
        angles = torch.einsum("t,d->td", places, self.cos[1])
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(turned, -1).flatten(-2)


class KeyPadding(Attending):
    """A mask from the input, expanded to all heads."""

    def mix(self, x: Tensor) -> Tensor:
        allowed = (x[..., 0] > -1)[:, None, None].expand(-1, self.num_heads, x.shape[1], -1)
        mixed = F.scaled_dot_product_attention(*self.heads(x, x), allowed)
        return mixed.transpose(1, 2).flatten(2)


class Folded(Attending):
    """[time, batch heads, size], as inside ``nn.MultiheadAttention``."""

    def mix(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            layer(x).transpose(0, 1).reshape(time, batch * self.num_heads, SIZE).transpose(0, 1)
            for layer in (self.q, self.k, self.v)
        )
        mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return mixed.transpose(0, 1).reshape(time, batch, -1).transpose(0, 1)


class FoldedFixed(Folded):
    """The same with the number of heads written into it."""

    def mix(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            layer(x).view(batch, time, 5, 4).transpose(1, 2).reshape(batch * 5, time, 4)
            for layer in (self.q, self.k, self.v)
        )
        mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return mixed.view(batch, 5, time, 4).transpose(1, 2).reshape(batch, time, 20)


class Windows(Attending):
    """Windows of an image, with a learned bias for each head and relative place."""

    index: Tensor

    def add_projections(self) -> None:
        super().add_projections()
        self.table = nn.Parameter(torch.randn(9, HEADS))
        at = torch.cartesian_prod(torch.arange(2), torch.arange(2))
        apart = at[:, None] - at[None] + 1
        self.register_buffer("index", 3 * apart[..., 0] + apart[..., 1])

    def mix(self, x: Tensor) -> Tensor:
        batch, height, width, maps = x.shape
        parts = x.view(batch, height // 2, 2, width // 2, 2, maps)
        q, k, v = self.heads(*2 * [parts.transpose(2, 3).reshape(-1, 4, maps)])
        bias = self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) / 2 + bias.unsqueeze(0)).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        windows = mixed.view(batch, height // 2, width // 2, 2, 2, -1).transpose(2, 3)
        return windows.reshape(batch, height, width, -1)


class ClassAttention(Attending):
    """Only the first token asks."""

    def mix(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x[:, :1], x))
        return mixed.transpose(1, 2).flatten(2)


class Latents(Attending):
    """Queries that are parameters."""

    def add_projections(self) -> None:
        self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.queries = nn.Parameter(torch.randn(HEADS, 4, SIZE))

    def mix(self, x: Tensor) -> Tensor:
        k, v = self.split(self.k(x)), self.split(self.v(x))
        weights = (self.queries @ k.transpose(-2, -1)).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Scaled(Attending):
    """Norms of queries and keys, a scale for each head, and a gate for each head and token."""

    def add_projections(self) -> None:
        super().add_projections()
        self.norm_q, self.norm_k = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.shape = nn.Parameter(torch.rand(HEADS, 1, SIZE) + 0.5)
        self.gate = nn.Linear(WIDTH, HEADS)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        mixed = F.scaled_dot_product_attention(self.norm_q(q) * self.shape, self.norm_k(k), v)
        gate = self.gate(x).sigmoid().transpose(1, 2).unsqueeze(-1)
        return (mixed * self.scale * gate).transpose(1, 2).flatten(2)


class Alibi(Attending):
    """Slopes made in the forward, one for each head: the heads stay."""

    def mix(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = slopes[:, None, None] * (places[None] - places[:, None]).abs()
        mixed = F.scaled_dot_product_attention(*self.heads(x, x), bias)
        return mixed.transpose(1, 2).flatten(2)


class AlibiBuffer(Attending):
    """Slopes in a buffer are cut with the heads."""

    slopes: Tensor

    def add_projections(self) -> None:
        super().add_projections()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def mix(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.slopes[:, None, None] * (places[None] - places[:, None]).abs()
        mixed = F.scaled_dot_product_attention(*self.heads(x, x), bias)
        return mixed.transpose(1, 2).flatten(2)


class OneHead(Attending):
    """Queries and keys are fixed; each feature of the values is a unit."""

    def mix(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)


class CrossCovariance(Attending):
    """Attention among the features of a head."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(-2, -1) for part in self.heads(x, x))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1)
        return (weights @ v).permute(0, 3, 1, 2).flatten(2)


class Linearized(Attending):
    """Linear attention: keys and values are multiplied first."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return (q @ (k.transpose(-2, -1) @ v) / total).transpose(1, 2).flatten(2)


class TalkingHeads(Attending):
    """Scores are mixed among heads: heads of queries and keys, and heads of values."""

    def add_projections(self) -> None:
        super().add_projections()
        self.talk = nn.Linear(HEADS, HEADS)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        scores = self.talk((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1))
        return (scores.permute(0, 3, 1, 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


class TorchDecoder(nn.Module):
    """Self-attention and cross-attention of torch, time first, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.layer = nn.TransformerDecoderLayer(8, 4, 14, dropout=0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, memory = self.inp(x).transpose(0, 1), self.inp(y).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(len(h))
        return self.head(self.layer(h, memory, tgt_mask=mask).mean(0))


class TorchStack(nn.Module):
    """Two encoder layers in torch's stack, which uses nested tensors for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 14, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.inp(x))[:, 0])


class Multihead(nn.Module):
    """Weights are asked for and not used; keys and values of other sizes, and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 12)
        self.attend = nn.MultiheadAttention(12, 4, add_bias_kv=True, kdim=5, vdim=5)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.transpose(0, 1)
        mixed, _ = self.attend(self.inp(memory), memory, memory)
        return self.head(self.norm(mixed).mean(0))


SERIES, BOTH = tensors((4, 5)), tensors((4, 5), (6, 5))
NORM = ("layer_norm",)
Q = {"q": 5}
ENTRIES = (
    Entry("attention", Attending, SERIES, Q, NORM),
    Entry("attention_manual", Manual, SERIES, Q, NORM),
    Entry("attention_nano_gpt", NanoGPT, SERIES, {"c_attn": 5}, NORM, "graph"),
    Entry("attention_chunked", Chunked, SERIES, {"qkv": 5}, NORM),
    Entry("attention_unbound", Unbound, SERIES, {"qkv": 5}, NORM),
    Entry("attention_head_major", HeadMajor, SERIES, {"qkv": 5}, NORM),
    Entry("attention_einsum", Einsum, SERIES, Q, NORM),
    Entry(
        "attention_einsum_weights", EinsumWeights, SERIES, {"q": 5, "v[0:4]": 4, "last": 20}, NORM
    ),
    Entry("attention_grouped", Grouped, SERIES, Q, NORM),
    Entry("attention_expanded", Expanded, SERIES, Q, NORM),
    Entry("attention_one_key_head", OneKeyHead, SERIES, Q, ("kv: 4 fixed: other units",)),
    Entry("attention_cross", CrossAttention, tensors((4, 5), (6, WIDTH)), Q, NORM),
    Entry("attention_rotary", Rotary, SERIES, Q, NORM),
    Entry("attention_rotary_pairs", RotaryPairs, SERIES, Q, NORM),
    Entry("attention_key_padding", KeyPadding, SERIES, Q, NORM),
    Entry("attention_folded", Folded, SERIES, Q, NORM),
    Entry("attention_folded_fixed", FoldedFixed, SERIES, Q, NORM, "graph"),
    Entry("attention_windows", Windows, tensors((4, 4, 5)), Q, NORM),
    Entry("attention_class", ClassAttention, SERIES, Q, NORM),
    Entry("attention_latents", Latents, SERIES, {"k": 5}, NORM),
    Entry("attention_scaled", Scaled, SERIES, Q, NORM),
    Entry(
        "attention_alibi",
        Alibi,
        SERIES,
        {},
        ("q: 20 fixed: it is combined with a tensor that cannot shrink: a constant",),
    ),
    Entry("attention_alibi_buffer", AlibiBuffer, SERIES, Q, NORM),
    Entry("attention_one_head", OneHead, SERIES, {"v": 20}, ("q: 20 fixed: activations are",)),
    Entry("attention_cross_covariance", CrossCovariance, SERIES, Q, NORM),
    Entry("attention_linearized", Linearized, SERIES, Q, NORM),
    Entry("attention_talking_heads", TalkingHeads, SERIES, {"q": 5, "v": 5}, NORM, "graph"),
    Entry(
        "torch_decoder",
        TorchDecoder,
        BOTH,
        {"layer.self_attn": 4, "layer.multihead_attn": 4, "layer.linear1": 14},
        NORM,
    ),
    Entry(
        "torch_stack",
        TorchStack,
        SERIES,
        {
            "layers.layers.0.self_attn": 4,
            "layers.layers.0.linear1": 14,
            "layers.layers.1.self_attn": 4,
            "layers.layers.1.linear1": 14,
        },
        NORM,
    ),
    Entry("multihead", Multihead, SERIES, {"inp": 12, "attend": 4}, NORM),
)
