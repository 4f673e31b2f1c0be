"""Mixtures of experts: what lies inside experts can go; experts that data choose cannot."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, tensors


def chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The shares and the numbers of the k experts for each row."""
    shares, experts = logits.softmax(-1).topk(k)
    return shares / shares.sum(-1, keepdim=True), experts


class DenseMixture(nn.Module):
    """Every expert computes every row: each is a branch with a width of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 5))
            for width in (7, 8, 9)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return sum(shares[:, e : e + 1] * net(x) for e, net in enumerate(self.experts))  # type: ignore[return-value]


class MaskedMixture(DenseMixture):
    """Every expert computes every row, and a mask keeps those of the two that were chosen."""

    def forward(self, x: Tensor) -> Tensor:
        shares, numbers = chosen(self.router(x), 2)
        result = torch.zeros(len(x), 5, dtype=x.dtype)
        for e, net in enumerate(self.experts):
            share = torch.where(numbers == e, shares, 0.0).sum(-1, keepdim=True)
            result = result + share * net(x)
        return result


class ChosenMatrices(nn.Module):
    """Stacked weights, of which each row takes those of two experts. Unit k is in all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.gate_up = nn.Parameter(torch.randn(4, 14, 6))
        self.down = nn.Parameter(torch.randn(4, 5, 7))

    def forward(self, x: Tensor) -> Tensor:
        shares, numbers = chosen(self.router(x), 2)
        h = torch.einsum("bi,bkoi->bko", x, self.gate_up[numbers])
        gate, up = h.chunk(2, -1)
        mixed = torch.einsum("bko,bkjo->bkj", F.silu(gate) * up, self.down[numbers])
        return (mixed * shares.unsqueeze(-1)).sum(1)


class ChosenMatricesInRows(ChosenMatrices):
    """The same as products of matrices: rows are repeated, one for each expert."""

    def forward(self, x: Tensor) -> Tensor:
        shares, numbers = chosen(self.router(x), 2)
        flat, rows = numbers.flatten(), x.repeat_interleave(2, 0)
        gate, up = torch.bmm(self.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        mixed = torch.bmm(self.down[flat].to(x.dtype), (F.silu(gate) * up).unsqueeze(-1))
        return (mixed.squeeze(-1) * shares.flatten().unsqueeze(-1)).unflatten(0, (-1, 2)).sum(1)


BY_DATA = ("the data choose among these experts", "softmax")

ENTRIES = [
    Entry(
        "experts_all",
        DenseMixture,
        tensors((6,)),
        {"experts.0.0": 7, "experts.1.0": 8, "experts.2.0": 9},
        ("softmax",),
    ),
    Entry(
        "experts_masked",
        MaskedMixture,
        tensors((6,)),
        {"experts.0.0": 7, "experts.1.0": 8, "experts.2.0": 9},
        ("softmax",),
    ),
    Entry("experts_chosen", ChosenMatrices, tensors((6,)), {"gate_up": 7}, BY_DATA),
    Entry("experts_chosen_rows", ChosenMatricesInRows, tensors((6,)), {"gate_up": 7}, BY_DATA),
]
