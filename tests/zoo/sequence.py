"""Embeddings, transformers and recurrent networks, on [batch, time, features].

Width under a layer norm is fixed for now: what can go in a transformer is its attention heads and
the width of its feed-forward layers. Other ways to write attention are in ``attention.py``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors, tokens


class MeanEmbedding(nn.Module):
    """The width of an embedding can go; its vocabulary cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.position = nn.Parameter(torch.randn(5, 12))
        self.fc1 = nn.Linear(12, 10)
        self.fc2 = nn.Linear(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = (self.embed(ids) + self.position).mean(1)
        return self.fc2(self.fc1(h).relu())


class TiedLanguageModel(nn.Module):
    """The residual sum and the tied readout make one set of units of embed's and fc2's width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.fc1 = nn.Linear(8, 12)
        self.fc2 = nn.Linear(12, 8)
        self.readout = nn.Linear(8, 11, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.readout(h + self.fc2(F.gelu(self.fc1(h))))


class Attention(nn.Module):
    """Two heads from one fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v)
        return self.proj(h.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A transformer's layer, norms first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8, 14), Block(8, 18)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class TorchEncoder(nn.Module):
    """Torch's own layer, which has a fast path in eval mode without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 4, 14, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.inp(x))[:, 0])


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.block = Block(8, 18)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.size(0), -1, -1), patches], dim=1) + self.position
        return self.head(self.norm(self.block(h))[:, 0])


class Llama(nn.Module):
    """RMS norm, rotary positions, four query heads on two key heads, SwiGLU without biases."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm1 = nn.RMSNorm(16)
        self.q = nn.Linear(16, 16, bias=False)
        self.k = nn.Linear(16, 8, bias=False)
        self.v = nn.Linear(16, 8, bias=False)
        self.o = nn.Linear(16, 16, bias=False)
        self.norm2 = nn.RMSNorm(16)
        self.gate = nn.Linear(16, 22, bias=False)
        self.up = nn.Linear(16, 22, bias=False)
        self.down = nn.Linear(22, 16, bias=False)
        self.head = nn.Linear(16, 11, bias=False)
        angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1, 1.0, 0.1]))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def attend(self, x: Tensor) -> Tensor:
        q, k = self.rotate(self.heads(self.q(x))), self.rotate(self.heads(self.k(x)))
        k, v = k.repeat_interleave(2, dim=1), self.heads(self.v(x)).repeat_interleave(2, dim=1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(h.transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(self.norm1(x))
        h = self.norm2(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


class EinsumAttention(nn.Module):
    """Attention and a feed-forward layer without norms: the width of the sum can go.

    `unflatten(-1, (2, -1))` would give heads of another width without an error if a head went, and
    another result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 12)
        self.q, self.k, self.v = (nn.Linear(12, 8) for _ in range(3))
        self.o = nn.Linear(8, 12)
        self.ff1 = nn.Linear(12, 18)
        self.ff2 = nn.Linear(18, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        q, k, v = (layer(x).unflatten(-1, (2, -1)) for layer in (self.q, self.k, self.v))
        weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
        x = x + self.o(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))
        x = x + self.ff2(self.ff1(x).relu())
        return self.head(x.mean(1))


class ResMLP(nn.Module):
    """Scales in place of norms, so the width of the patches can go.

    token1 and token2 contract the 4 places of the image, which are fixed, as inputs' pixels are;
    the hidden units between them are a group like any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 10, 4, stride=4)
        self.scale = nn.Parameter(torch.randn(10))
        self.shift = nn.Parameter(torch.randn(10))
        self.token1 = nn.Linear(4, 7)
        self.token2 = nn.Linear(7, 4)
        self.channel1 = nn.Linear(10, 14)
        self.channel2 = nn.Linear(14, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        places = torch.addcmul(self.shift, self.scale, x).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(places))).transpose(1, 2)
        x = x + self.channel2(F.gelu(self.channel1(x)))
        return self.head(x.mean(1))


class TimeMajor(nn.Module):
    """[time, batch, features] on the inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 12)
        self.fc2 = nn.Linear(12, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(self.fc1(x.transpose(0, 1)).relu()).relu()
        return self.out(h[-1] + h.mean(0))


class LSTMClassifier(nn.Module):
    """What the LSTM reads and makes is fixed; the dense layer after it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.fc1 = nn.Linear(8, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(ids))
        return self.fc2(self.fc1(states[:, -1]).relu())


class GRUClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc0 = nn.Linear(5, 10)
        self.gru = nn.GRU(10, 8, batch_first=True, bidirectional=True)
        self.fc1 = nn.Linear(16, 7)
        self.fc2 = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.fc0(x).relu())
        return self.fc2(self.fc1(states).relu().mean(1))


class Recurrence(nn.Module):
    """A loop over time: state unit k is made by read and by keep, and read by keep."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(5, 9)
        self.keep = nn.Linear(9, 9, bias=False)
        self.out = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.read(x[:, 0]).tanh()
        for t in range(1, x.size(1)):
            state = (self.read(x[:, t]) + self.keep(state)).tanh()
        return self.out(state)


class ZeroState(nn.Module):
    """As Recurrence, from zeros of a stored size: zeros hold no unit back."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 9
        self.read = nn.Linear(5, self.hidden)
        self.keep = nn.Linear(self.hidden, self.hidden, bias=False)
        self.out = nn.Linear(self.hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.size(0), self.hidden)
        for t in range(x.size(1)):
            state = (self.read(x[:, t]) + self.keep(state)).tanh()
        return self.out(state)


WORDS = tokens(11, 5)
SERIES = tensors((4, 5))
NORM = ("layer_norm",)
ENTRIES = (
    Entry("mean_embedding", MeanEmbedding, WORDS, {"embed": 12, "fc1": 10}),
    Entry("tied_language_model", TiedLanguageModel, WORDS, {"embed": 8, "fc1": 12}),
    Entry(
        "encoder",
        Encoder,
        WORDS,
        {
            "blocks.0.attention": 2,
            "blocks.0.fc1": 14,
            "blocks.1.attention": 2,
            "blocks.1.fc1": 18,
        },
        NORM,
        form="graph",
    ),
    Entry(
        "torch_encoder",
        TorchEncoder,
        SERIES,
        {"layer.self_attn": 4, "layer.linear1": 14},
        NORM,
    ),
    Entry(
        "vision_transformer",
        VisionTransformer,
        tensors((3, 8, 8)),
        {"block.attention": 2, "block.fc1": 18},
        NORM,
        form="graph",
    ),
    Entry("llama", Llama, WORDS, {"q": 2, "gate": 22}, ("rms_norm",)),
    Entry(
        "einsum_attention",
        EinsumAttention,
        SERIES,
        {"inp": 12, "q": 2, "ff1": 18},
        form="graph",
    ),
    Entry("resmlp", ResMLP, tensors((3, 8, 8)), {"patch": 10, "token1": 7, "channel1": 14}),
    Entry("time_major", TimeMajor, SERIES, {"fc1": 12, "fc2": 10}),
    Entry("lstm", LSTMClassifier, WORDS, {"fc1": 12}, ("lstm",)),
    Entry("gru", GRUClassifier, SERIES, {"fc1": 7}, ("gru",)),
    Entry("recurrence", Recurrence, SERIES, {"read": 9}),
    Entry("zero_state", ZeroState, SERIES, {"read": 9}),
)
