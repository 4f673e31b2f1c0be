"""Every convention's own penalty, written out, is the penalty that its lambda gives."""

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from tests.gating.oracles import gradients, spread

VALUE = 0.37


@pytest.fixture
def gated() -> hc.GatedModel:
    """4 gates of 7 weights, 7 gates of 2, 14 single weights."""
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2), nn.Linear(2, 7))
    sites = ["0:in", "1:in", "2:each"]
    return spread(hc.attach_gates(model, torch.zeros(3, 4), sites=sites))


def probabilities(gated: hc.GatedModel) -> list[Tensor]:
    return list(gated.open_probability().values())


def weights(gated: hc.GatedModel) -> Tensor:
    first, second, third = probabilities(gated)
    return 7 * first.sum() + 2 * second.sum() + third.sum()


WRITTEN_OUT = {
    "weight": weights,
    "gate": lambda gated: torch.cat(probabilities(gated)).sum(),
    "mean": lambda gated: torch.cat(probabilities(gated)).mean(),
    "share": lambda gated: weights(gated) / (4 * 7 + 7 * 2 + 14),
}


@pytest.mark.parametrize("per", WRITTEN_OUT)
def test_the_penalty_is_the_one_meant(per: str, gated: hc.GatedModel) -> None:
    """For a mean loss, and for one that is summed over 128 examples: alike up to that factor."""
    for examples in (1, 128):
        there = VALUE * WRITTEN_OUT[per](gated)
        lam = hc.lam_per_weight(VALUE, per=per, examples=examples, gated=gated)
        here = examples * hc.L0Penalty(gated, lam)()
        torch.testing.assert_close(here, there)
        torch.testing.assert_close(gradients(here, gated.gates), gradients(there, gated.gates))


def test_a_summed_loss_has_the_same_minimum(gated: hc.GatedModel) -> None:
    """The gradient of sum + value * L0 is a multiple of that of mean + lam * L0."""
    x = torch.randn(3, 4)
    gated.eval()
    losses = gated(x).square().mean(1)
    lam = hc.lam_per_weight(VALUE, examples=3)
    summed = gradients(losses.sum() + VALUE * weights(gated), gated)
    mean = gradients(gated(x).square().mean(1).mean() + hc.L0Penalty(gated, lam)(), gated)
    for there, here in zip(summed, mean, strict=True):
        torch.testing.assert_close(there, 3 * here)


def test_the_number_of_the_papers_tables() -> None:
    assert hc.lam_per_weight(0.1, examples=60_000) == 0.1 / 60_000
    assert hc.lam_per_weight(0.3) == 0.3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"per": "unit"}, "per='unit' is not known"),
        ({"per": "gate"}, "per='gate' needs gated="),
        ({"examples": 0}, "examples=0 must be at least 1"),
        ({"value": -1.0}, "value=-1.0 must not be negative"),
    ],
)
def test_refusals(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.lam_per_weight(**{"value": 1.0, **settings})
