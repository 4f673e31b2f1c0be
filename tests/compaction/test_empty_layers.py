import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.empty_layers import allow_empty


class Residual(nn.Module):
    """A branch with norms, a stride and padding beside a projected shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1, stride=2)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding="same")
        self.norm2 = nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(8, 8, 1, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.shortcut(x) + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return self.head(x.mean((2, 3)))


def with_a_shut_branch() -> hc.GatedModel:
    torch.manual_seed(0)
    gated = hc.attach_gates(Residual(), torch.randn(2, 3, 8, 8))
    group = next(group for group in gated.groups if group.name == "conv1")
    with torch.no_grad():
        gated.gates.log_alpha.fill_(1.0)
        gated.gates.log_alpha[group.slice] = -9.0
    return gated


@pytest.mark.parametrize("training", [False, True])
def test_a_shut_residual_branch_goes(training: bool) -> None:
    gated = with_a_shut_branch()
    gated.freeze_gates()
    small = hc.compact(gated, min_units=0)
    assert type(small) is Residual
    assert hc.CompactionPlan.of(small).groups["conv1"].kept == ()
    assert small.conv1.weight.numel() == small.conv2.weight.numel() == 0
    assert (small.conv1.out_channels, small.conv2.in_channels) == (0, 0)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(small.train(training)(x), gated.train(training)(x))
    assert hc.count(small, x).macs < hc.count(Residual(), x).macs / 2


def test_by_default_a_unit_stays() -> None:
    small = hc.compact(with_a_shut_branch())
    assert len(hc.CompactionPlan.of(small).groups["conv1"].kept) == 1
    with pytest.raises(hc.HardConcreteError, match="min_units=-1 must be a whole number"):
        hc.compact(with_a_shut_branch(), min_units=-1)


@pytest.mark.parametrize("padding", [0, 2, "same", "valid"])
def test_an_empty_convolution_is_its_bias(padding: int | str) -> None:
    full = nn.Conv2d(3, 4, 3, padding=padding, dilation=2)
    full.weight.data.zero_()
    empty = nn.Conv2d(3, 4, 3, padding=padding, dilation=2)
    empty.weight.data, empty.bias = torch.zeros(4, 0, 3, 3), full.bias
    allow_empty(empty)
    x = torch.randn(2, 3, 7, 9)
    torch.testing.assert_close(empty(x[:, :0]), full(x))
    for again in (copy.deepcopy(empty), pickle.loads(pickle.dumps(empty))):
        assert type(again) is type(empty)
        assert torch.equal(again(x[:, :0]), empty(x[:, :0]))


def test_what_is_not_empty_stays_what_it_is() -> None:
    for layer in (nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()):
        kind = type(layer)
        allow_empty(layer)
        assert type(layer) is kind


def test_an_empty_transposed_convolution_is_its_bias() -> None:
    full = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1)
    full.weight.data.zero_()
    empty = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1)
    empty.weight.data, empty.bias = torch.zeros(0, 4, 3, 3), full.bias
    allow_empty(empty)
    x = torch.randn(2, 3, 5, 6)
    torch.testing.assert_close(empty(x[:, :0]), full(x))
