"""Bytes of keys and values per token, against numbers by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.cost.key_values import KeyValues, key_values
from hardconcrete.errors import ArgumentError, GateError
from hardconcrete.units import analyze
from hardconcrete.units.analysis import batch_of
from tests.zoo import ZOO
from tests.zoo.attention import Attending, Expanded, Grouped, Latents

BY_HAND = {
    "attention": 2 * 20,
    "attention_manual": 2 * 20,
    "attention_nano_gpt": 2 * 20,
    "attention_unbound": 2 * 20,
    "attention_einsum": 2 * 20,
    "attention_einsum_weights": 2 * 20,
    "attention_grouped": 2 * 10,
    "attention_expanded": 2 * 10,
    "attention_one_key_head": 2 * 4,
    "attention_cross": 2 * 20,
    "attention_rotary": 2 * 20,
    "attention_folded": 2 * 20,
    "attention_windows": 4 * 2 * 20,
    "attention_class": 2 * 20,
    "attention_latents": 2 * 20,
    "attention_linearized": 0,
    "attention_talking_heads": 2 * 20,
    "torch_decoder": 2 * 2 * 8,
    "multihead": 2 * 12,
    "llama": 2 * 8,
    "experts": 0,
    "mlp": 0,
}
"""Entries for one token; in windows, for one position of each of the four."""


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("entry", [e for e in ZOO if e.name in BY_HAND], ids=lambda e: e.name)
def test_a_forward_and_its_trace_show_the_same_keys_and_values(entry: object, batch: int) -> None:
    model, (args, kwargs) = entry.build().eval(), entry.inputs(batch)
    expected = 4 * BY_HAND[entry.name]
    assert hc.count(model, args, kwargs).kv_bytes == expected
    analysis = analyze(model, args, kwargs)
    found, _ = key_values(analysis.labelled)
    assert found.bytes_per_token(batch_of(analysis.labelled)) == expected


def test_half_precision_halves_the_bytes() -> None:
    model = Attending().to(torch.float16)
    assert hc.count(model, torch.zeros(1, 6, 5, dtype=torch.float16)).kv_bytes == 2 * 40


class Shared(Attending):
    """Two layers with the same keys and values."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        mixed = F.scaled_dot_product_attention(q, k, v)
        mixed = F.scaled_dot_product_attention(mixed, k, v)
        return mixed.transpose(1, 2).flatten(2)


def test_keys_of_several_layers_count_once() -> None:
    assert hc.count(Shared(), torch.zeros(2, 6, 5)).kv_bytes == 4 * 40
    gated = hc.attach_gates(Shared(), torch.zeros(2, 6, 5))
    assert gated.costs.dense("kv_bytes") == 4 * 40


def test_budget_on_the_cache() -> None:
    """Five heads: at 0.4 two stay, and the compacted model holds that much."""
    torch.manual_seed(0)
    gated = hc.attach_gates(Attending(), torch.randn(2, 6, 5))
    budget = hc.Budget(gated, kv_bytes=0.4, steps=20)
    optimizer = torch.optim.Adam(gated.parameters(), lr=1e-3)
    for _ in range(20):
        loss = gated(torch.randn(4, 6, 5)).square().mean() + budget()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
    assert "bytes of keys and values per token: 40.0% delivered" in str(budget)
    small = hc.compact(gated, budget=budget)
    assert hc.count(small, torch.zeros(1, 6, 5)).kv_bytes == 2 * 2 * 4 * 4
    assert small.q.out_features == 8


def test_grouped_queries_keep_their_keys_until_the_group_goes() -> None:
    gated = hc.attach_gates(Grouped(), torch.randn(2, 6, 5))
    heads = next(group for group in gated.groups if group.name == "q")
    with torch.no_grad():
        gated.gates.log_alpha[heads.slice] = 90.0
        gated.gates.log_alpha[heads.start] = -90.0
    small = hc.compact(gated)
    found = hc.count(small, torch.zeros(2, 6, 5)).kv_bytes
    assert gated.delivered("kv_bytes").item() == gated.expected("kv_bytes").item() == found == 64


def test_expected_bytes_are_a_mean() -> None:
    """Of one layer of heads they are linear in the probabilities, and differentiable."""
    gated = hc.attach_gates(Expanded(), torch.randn(2, 6, 5), droprate=0.2, include="q")
    (heads,) = gated.groups
    p = gated.gates.open_probability()
    gated.expected("kv_bytes").backward()
    assert (gated.gates.log_alpha.grad > 0).all()
    assert p.mean().item() * 80 == pytest.approx(gated.expected("kv_bytes").item(), rel=0.05)
    assert heads.units == 5


def test_prune_pareto_and_reports_know_the_cache() -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(16, 6, 5)

    def loss(m: nn.Module, batch: Tensor) -> Tensor:
        return m(batch).square().mean()

    small = hc.prune(model, x[:2], [x], loss, kv_bytes=0.6, stages=1)
    assert hc.count(small, x[:1]).kv_bytes == 96
    sizes: dict[str, object] = {"fractions": [0.6], "cost": "kv_bytes", "repeats": 0}
    curve = hc.pareto(model, x[:2], [x], loss, evaluate=lambda m: loss(m, x), **sizes)
    assert curve.points[0].kv_bytes == 96
    assert "KV bytes" in str(curve)
    report = str(hc.measure(model, small, x[:1], batches=(1,), repeats=2))
    assert "keys and values per token" in report
    assert "160 B of keys and values per token" in str(hc.count(model, x[:1]))


def test_an_unknown_cost_of_a_curve_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cost='flops' is not known; use one of params, macs"):
        hc.pareto(Attending(), None, [], None, fractions=[0.5], cost="flops", evaluate=float)


def test_without_attention_there_is_nothing_to_limit() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(2, 4)
    with pytest.raises(ArgumentError, match="attention, and this model has none"):
        hc.prune(model, x, [x], lambda m, batch: m(batch).sum(), kv_bytes=9)
    gated = hc.attach_gates(model, x)
    with pytest.raises(ArgumentError, match="limit macs or params instead"):
        hc.Budget(gated, kv_bytes=0.5)
    assert gated.expected("kv_bytes").item() == 0


class Sliced(Attending):
    """The last position of the scores has no value."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, x)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)[..., :-1]
        return (weights @ v[:, :, :-1]).transpose(1, 2).flatten(2)


def test_unclear_keys_are_refused() -> None:
    assert hc.count(Sliced(), torch.zeros(2, 6, 5)).kv_bytes is None
    gated = hc.attach_gates(Sliced(), torch.zeros(2, 6, 5))
    for ask in (gated.expected, gated.delivered, gated.costs.dense):
        with pytest.raises(GateError, match="kv_bytes cannot be determined: the keys and values"):
            ask("kv_bytes")
    with pytest.raises(GateError, match="use macs or params, or units of its heads, instead"):
        hc.Budget(gated, kv_bytes=0.5)
    assert gated.delivered("macs").item() == gated.costs.dense("macs")
    assert "kv_bytes" not in str(gated.costs)


def test_a_size_that_is_no_whole_number_per_token_is_unclear() -> None:
    known = KeyValues()
    query = key = torch.zeros(1, 3, 2)
    known.follow(torch.ops.aten.scaled_dot_product_attention.default, (query, key, key), query)
    assert known.bytes_per_token(1) == 8
    assert known.bytes_per_token(5) is None


def test_queries_that_are_parameters_are_no_keys() -> None:
    assert hc.count(Latents(), torch.zeros(2, 4, 5)).kv_bytes == 160


@pytest.mark.parametrize("name", ["attention", "attention_manual", "attention_grouped"])
def test_macs_of_attention_grow_with_the_square_of_the_length(name: str) -> None:
    """Of five heads of four features, in two products; a head takes its share along."""
    entry = next(entry for entry in ZOO if entry.name == name)
    dense, delivered = [], []
    for length in (6, 12, 18):
        gated = hc.attach_gates(entry.build(), torch.zeros(2, length, 5))
        with torch.no_grad():
            gated.gates.log_alpha.fill_(90.0)
            gated.gates.log_alpha[next(g for g in gated.groups if g.name == "q").start] = -90.0
        dense.append(gated.costs.dense("macs"))
        delivered.append(gated.delivered("macs").item())
        assert gated.expected("macs").item() == delivered[-1]
    heads = 5 - 1
    assert dense[2] - 2 * dense[1] + dense[0] == 2 * 2 * 2 * 36 * 20
    assert delivered[2] - 2 * delivered[1] + delivered[0] == 2 * 2 * 2 * 36 * 4 * heads
