"""Named sites whose closed gates cannot make a model smaller: compaction says so."""

import warnings

import pytest
import torch
from torch import nn

import hardconcrete as hc


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.last(mixed.transpose(1, 2).flatten(2))


def gated_at(model: nn.Module, site: str, shut: slice, x: torch.Tensor) -> hc.GatedModel:
    gated = hc.attach_gates(model, x, sites=[site])
    with torch.no_grad():
        gated.gates.log_alpha.fill_(9.0)
        gated.gates.log_alpha[shut] = -9.0
    return gated


def test_a_part_of_a_head() -> None:
    """A closed value does not close its head, whose queries and keys remain."""
    x = torch.randn(2, 3, 8)
    gated = gated_at(Attention(), "value:out", slice(4), x)
    words = r"value:out: 4 of 8 gates are closed.*the units of query stay.*include='query'"
    with pytest.warns(hc.HardConcreteWarning, match=words):
        small = hc.compact(gated)
    assert hc.count(small, x).params == hc.count(Attention(), x).params
    torch.testing.assert_close(small(x), gated.eval()(x))


def test_units_that_stay() -> None:
    """The model's output cannot lose a unit."""
    x = torch.randn(2, 3, 8)
    words = "last:out: 1 of 4 gates are closed.*stay, because of this: the model's output"
    with pytest.warns(hc.HardConcreteWarning, match=words):
        hc.compact(gated_at(Attention(), "last:out", slice(1), x))


def test_sites_that_make_it_smaller() -> None:
    """Neither a site that removes a unit, nor one on single weights, needs words."""
    x = torch.randn(2, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hc.compact(gated_at(Attention(), "last:in", slice(4), x))
        hc.compact(gated_at(Attention(), "last:each", slice(1), x))
        hc.compact(gated_at(Attention(), "value:out", slice(0), x))
