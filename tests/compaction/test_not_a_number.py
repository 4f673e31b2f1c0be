"""NaN equals NaN in a comparison of outputs, so it is refused before one is made."""

import math

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, CompactionError, DataError, GateError


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def broken(name: str) -> nn.Module:
    model = network()
    model.state_dict()[name].view(-1)[0] = math.nan
    return model


x = torch.randn(4, 6)


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "3.bias"])
def test_one_nan_is_refused(name: str) -> None:
    words = f"there is NaN in {name}: go back to the last checkpoint"
    with pytest.raises(CompactionError, match=words):
        hc.compact(broken(name), x, keep={"0": [0, 1]})
    gated = hc.attach_gates(broken(name), x)
    with pytest.raises(CompactionError, match=words):
        hc.compact(gated)
    with pytest.raises(CompactionError, match=words):
        hc.shrink(gated, None)
    with pytest.warns(hc.HardConcreteWarning, match=f"there is NaN in {name}"):
        hc.check_gates(gated)


def test_nan_in_gates() -> None:
    gated = hc.attach_gates(network(), x)
    budget = hc.Budget(gated, macs=0.5, by="gates")
    gated.gates.log_alpha.data[0] = math.nan
    for act in (lambda: hc.compact(gated), lambda: hc.shrink(gated, None)):
        with pytest.raises(CompactionError, match="log_alpha is not a number in 0"):
            act()
    with pytest.raises(GateError, match="log_alpha has NaN in it, so the gates have no cost"):
        budget()


def test_a_small_model_with_nan_is_not_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    small = hc.compact(network(), x, keep={"0": [0, 1]})
    small[0].weight.data[0, 0] = math.nan  # type: ignore[index, union-attr, operator]
    with pytest.raises(DataError, match=r"was not written: 0.weight has NaN in it"):
        hc.save(tmp_path / "m", small)
    assert not [*tmp_path.iterdir()]


def test_statistics_stay_as_they_were() -> None:
    model = network()
    hc.recalibrate(model, [x])
    before = model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    for value in (math.nan, math.inf):
        with pytest.raises(ArgumentError, match="the statistics of 1 would not be finite"):
            hc.recalibrate(model, [x, x * value])
        assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]


def test_infinite_masks_pass() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.register_buffer("mask", torch.tensor([0.0, -math.inf, 0.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) + self.mask).softmax(-1)

    hc.compact(Masked(), x, keep={"inner.0": [0, 1]})
