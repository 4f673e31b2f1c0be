"""Padding does not count in a re-fit, whatever hides it from the loss."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.importance.refit import refit
from hardconcrete.importance.relevant_rows import relevant_rows

LENGTHS = torch.tensor([5, 3, 1, 4])
MASK = torch.arange(6) < LENGTHS[:, None]


class Encoder(nn.Module):
    """An attention layer and a feed-forward network, with the mean over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
        x = x + self.down(self.up(x).relu())
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_rows_that_count_are_those_of_the_mask(frozen: bool) -> None:
    model = Encoder().requires_grad_(not frozen)
    rows = relevant_rows(model, (torch.randn(4, 6, 8), MASK), loss)
    assert rows.keys() == {(4, 6), (6, 4), (24,)}  # two layers, and inside of the attention
    assert torch.equal(rows[4, 6], MASK.flatten())
    assert torch.equal(rows[6, 4].view(6, 4).T, MASK)
    assert torch.equal(rows[(24,)].view(6, 4).T, MASK)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_relu_alone_hides_no_row() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # all units are off
    rows = relevant_rows(model, torch.randn(5, 2), lambda model, x: model(x).sum())
    assert rows[(5,)].all()


def test_without_gradients_every_row_counts() -> None:
    model = nn.Linear(2, 3)
    free = torch.ones((), requires_grad=True)
    rows = relevant_rows(model, torch.randn(5, 2), lambda model, x: free + model(x).sum().detach())
    assert not rows


def test_pruning_does_not_depend_on_what_padding_holds() -> None:
    torch.manual_seed(0)
    model = Encoder().double().eval()
    x = torch.randn(8, 4, 6, 8).double()
    other = torch.where(MASK[..., None], x, 100 * torch.randn_like(x))
    inputs = x[0], MASK
    small = [
        hc.prune(model, inputs, [(part, MASK) for part in batches], loss, macs=0.6, stages=1)
        for batches in (x, other)
    ]
    for first, second in zip(*(each.state_dict().values() for each in small), strict=True):
        torch.testing.assert_close(first, second)


def test_rows_that_do_not_count_are_not_fitted() -> None:
    """Targets that no weights can reach, in rows that do not count, change nothing."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()
    small = copy.deepcopy(dense)
    small[1].weight.data[:, :3] = 0
    x = torch.randn(64, 4).double()
    counts = torch.arange(64) < 40
    other = torch.where(counts[:, None], x, 100.0)
    fitted = []
    for batch in (x, other):
        model = copy.deepcopy(small)
        refit(model, dense, [batch], lambda model, x: model(x), relevant=[{(64,): counts}])
        fitted.append(model[1].weight)
    torch.testing.assert_close(*fitted)
    assert not torch.allclose(fitted[0], small[1].weight)
    assert F.mse_loss(small(x[:40]), dense(x[:40])) > 0
