"""A smaller model at once: the limits, what is left as it was, and what is refused in words."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, CompactionError, SiteError

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    maps = nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 12, 3)
    return nn.Sequential(
        *maps, nn.ReLU(), nn.Flatten(), nn.Linear(192, 20), nn.ReLU(), nn.Linear(20, 3)
    )


def batches(count: int = 4, size: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count * size, 2, 6, 6, generator=generator)
    labels = images.mean((2, 3)).mul(9).round().abs().sum(1).long().clamp(max=2)
    return list(zip(images.split(size), labels.split(size), strict=True))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def trained() -> nn.Sequential:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        for batch in batches():
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
    return model


EXAMPLE = torch.zeros(1, 2, 6, 6)


def same_outputs(model: nn.Module, small: nn.Module) -> float:
    """The part of the outputs' variance that the small model misses."""
    with torch.no_grad():
        pairs = [(model.eval()(x), small.eval()(x)) for x, _ in batches()]
    dense, now = (torch.cat(outputs) for outputs in zip(*pairs, strict=True))
    return float((now - dense).square().mean() / dense.var())


@pytest.mark.parametrize(
    "limits",
    [
        {"macs": 0.5},
        {"params": 0.4},
        {"weight_bytes": 0.6},
        {"units": 24},
        {"units": {"0": 5, "6": 0.5}},
        {"macs": 0.6, "params": 0.3},
        {"macs": 20_000},
    ],
    ids=str,
)
def test_every_limit_is_met_and_nearly_used(trained: nn.Sequential, limits: dict[str, Any]) -> None:
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, stages=2, **limits)
    dense, found = hc.count(trained, EXAMPLE), hc.count(small, EXAMPLE)
    used = []
    for name, limit in limits.items():
        if name == "units":
            widths = {group: len(k.kept) for group, k in hc.CompactionPlan.of(small).groups.items()}
            assert widths == {"0": 5, "3": 12, "6": 10} or sum(widths.values()) == limit
            used.append(1.0)
        else:
            whole = getattr(dense, name) if isinstance(limit, float) else 1
            used.append(getattr(found, name) / (limit * whole))
    assert 0.9 < max(used) <= 1


def test_it_computes_nearly_the_same(trained: nn.Sequential) -> None:
    """Also better than the same choice without a re-fit, and than one stage."""
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, macs=0.6)
    missing = same_outputs(trained, small)
    plain = hc.CompactionPlan.of(small).apply(trained)
    assert missing < 0.15
    assert missing < 0.5 * same_outputs(trained, plain)
    assert [type(module) for module in small] == [type(module) for module in trained]


def test_the_users_model_stays_as_it_is(trained: nn.Sequential) -> None:
    model = copy.deepcopy(trained).train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    small = hc.prune(model, EXAMPLE, iter(batches()), cross_entropy, macs=0.5, stages=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes == [m.training for m in small.modules()]
    assert [p.requires_grad for p in small.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert model[3].weight.grad is not None
    assert model[3].weight.grad.eq(1).all()
    assert all(p.grad is None for p in (model[0].weight, *small.parameters()))
    assert type(model[0]) is nn.Conv2d


def test_the_same_call_gives_the_same_model(trained: nn.Sequential) -> None:
    first, second = (
        hc.prune(trained, EXAMPLE, batches(), cross_entropy, macs=0.5, stages=2) for _ in range(2)
    )
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_frozen_models_and_calls_without_gradients(trained: nn.Sequential) -> None:
    model = copy.deepcopy(trained).requires_grad_(False)
    with torch.no_grad():
        small = hc.prune(model, EXAMPLE, batches(), cross_entropy, macs=0.5, stages=1)
    assert not any(p.requires_grad for p in small.parameters())
    with torch.inference_mode():
        made_here = copy.deepcopy(trained)
        again = hc.prune(made_here, EXAMPLE.clone(), batches(), cross_entropy, macs=0.5, stages=1)
    assert hc.count(again, EXAMPLE).macs == hc.count(small, EXAMPLE).macs


@pytest.mark.parametrize("size", [4, 8])
def test_widths_are_multiples(trained: nn.Sequential, size: int) -> None:
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, macs=0.6, stages=2, round_to=size)
    for kept in hc.CompactionPlan.of(small).groups.values():
        assert len(kept.kept) % size == 0 or len(kept.kept) == kept.units


def test_some_groups_only(trained: nn.Sequential) -> None:
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, params=0.7, include="6", stages=1)
    assert (small[0].out_channels, small[3].out_channels) == (16, 12)
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, params=0.7, exclude="6", stages=1)
    assert small[6].out_features == 20


def test_a_limit_in_milliseconds(trained: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table that is made up: a microsecond for every multiply-add."""
    table = hc.attach_gates(copy.deepcopy(trained), EXAMPLE).ledger

    class Table:
        dense = float(table.dense[1])

        def delivered(self, is_open: Tensor) -> Tensor:
            return table.cost(is_open)[1]

        expected = delivered

    monkeypatch.setattr(hc.GatedModel, "latency", Table())
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, latency_ms=20_000, stages=2)
    assert 18_000 < hc.count(small, EXAMPLE).macs <= 20_000
    with pytest.warns(hc.HardConcreteWarning, match="within latency_ms=1000000 already"):
        hc.prune(trained, EXAMPLE, batches(), cross_entropy, latency_ms=1_000_000)


def test_a_limit_that_holds_already_is_said(trained: nn.Sequential) -> None:
    for limit in (1.0, 10**9):
        with pytest.warns(
            hc.HardConcreteWarning, match=f"within macs={limit} already: nothing was"
        ):
            small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, macs=limit)
        assert same_outputs(trained, small) == 0
        assert small is not trained
        assert hc.CompactionPlan.of(small).cuts == ()


class Odd(nn.Module):
    """Reads its hidden units by an operator that the re-fit does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return torch.einsum("bi,oi->bo", hidden, self.last.weight) + self.last.bias


def test_what_is_not_refitted_is_named_in_one_warning() -> None:
    x = torch.randn(64, 4)
    with pytest.warns(hc.HardConcreteWarning) as record:
        small = hc.prune(
            Odd(), x[:2], x.split(16), lambda m, x: m(x).square().mean(), macs=0.5, stages=1
        )
    assert small.last.in_features == 6
    assert len(record) == 1
    assert "lost inputs and could not be re-fitted (last.weight: " in str(record[0].message)


def test_keyword_inputs() -> None:
    class Named(nn.Sequential):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x)

    model, x = Named(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2)), torch.randn(64, 4)
    loss = lambda model, batch: model(**batch).square().mean()  # noqa: E731
    small = hc.prune(model, (), [{"x": x}], loss, {"x": x[:2]}, macs=0.5, stages=1)
    assert small[0].out_features == 6


def bad(**changes: Any) -> dict[str, Any]:
    given = {"model": network(), "example_inputs": EXAMPLE, "batches": batches()}
    return given | {"loss": cross_entropy, "macs": 0.5} | changes


def never(_: nn.Module, batch: Batch) -> Tensor:
    return batch[0].mean()


def detached(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch).detach()


def whole(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def elsewhere(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, [part.to("meta") for part in batch])  # type: ignore[arg-type]


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"macs": None}, ArgumentError, r"prune needs a limit, for example prune\(..., macs=0.5\)"),
    ({"macs": 1.5}, ArgumentError, "a float is a fraction of the dense total"),
    ({"macs": 0.001}, ArgumentError, "a budget of 0.1% of the MACs cannot be met"),
    ({"macs": 0.05, "round_to": 8}, CompactionError, "raise the limit, or lower round_to"),
    ({"latency_ms": "fast", "macs": None}, ArgumentError, "must be a number of milliseconds"),
    ({"units": {"7": 3}}, ArgumentError, "'7' is not a group; the groups are 0, 3, 6"),
    ({"loss": never}, ArgumentError, "did not call the model that was passed"),
    ({"loss": detached}, ArgumentError, "returned a tensor without a gradient"),
    ({"loss": whole}, ArgumentError, r"must return a scalar tensor, and returned \[16, 3\]"),
    ({"loss": lambda m, b: m(b[1])}, ArgumentError, r"loss\(model, batch\) failed; it said"),
    ({"batches": []}, ArgumentError, "batches is empty"),
    ({"batches": 3}, ArgumentError, "batches is a int; it takes an iterable of batches"),
    ({"stages": 0}, ArgumentError, "stages=0 must be a whole number, at least 1"),
    ({"examples": 2.5}, ArgumentError, "examples=2.5 must be a whole number"),
    ({"round_to": True}, ArgumentError, "round_to=True must be a whole number"),
    ({"model": nn.Linear(3, 2), "batches": [torch.zeros(2, 3)], "example_inputs": torch.zeros(2, 3),
      "loss": lambda m, x: m(x).mean()}, SiteError, "no units that could be removed"),
    ({"model": 3}, ArgumentError, "prune takes a module, not a int"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED]
)
def test_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    given = bad(**changes)
    with pytest.raises(error, match=words):
        hc.prune(**given)


def test_batches_elsewhere_are_named() -> None:
    there = [tuple(part.to("meta") for part in batch) for batch in batches()]
    with pytest.raises(ArgumentError, match="the batch is on meta and the model on cpu; it said"):
        hc.prune(**bad(batches=there))


def test_gated_models_are_sent_to_compact() -> None:
    gated = hc.attach_gates(network(), EXAMPLE)
    with pytest.raises(ArgumentError, match=r"there is compact\(gated, budget="):
        hc.prune(**bad(model=gated))


def test_a_loss_that_no_unit_changes_is_refused(trained: nn.Sequential) -> None:
    def constant(model: nn.Module, batch: Any) -> Tensor:
        return 0 * cross_entropy(model, batch)

    with pytest.raises(ArgumentError, match="does not depend on any unit"):
        hc.prune(trained, EXAMPLE, batches(), constant, macs=0.5)


def test_a_model_that_is_pruned_twice_loads_into_the_dense_one(
    trained: nn.Sequential, tmp_path: Path
) -> None:
    small = hc.prune(trained, EXAMPLE, batches(), cross_entropy, macs=0.7, stages=1)
    smaller = hc.prune(small, EXAMPLE, batches(), cross_entropy, macs=0.7, stages=1)
    hc.save(tmp_path / "smaller.safetensors", smaller)
    again = hc.load(tmp_path / "smaller.safetensors", copy.deepcopy(trained)).eval()
    torch.testing.assert_close(again(EXAMPLE), smaller.eval()(EXAMPLE))


class Heads(nn.Module):
    """Torch's encoder layers, whose heads are units."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.inp(x)).mean(1))


def sequences() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(32, 7, 6, generator=generator) for _ in range(6)]
    return [(x, (x[:, 0, 0] > 0).long() + (x[:, :, 1].amax(1) > 1).long()) for x in inputs]


ATTENTION = [f"layers.layers.{k}.self_attn" for k in range(2)]


def test_attention_heads_go_by_importance() -> None:
    """With a re-fit of what reads the heads, and without a limit on them alone."""
    torch.manual_seed(0)
    model, example = Heads().eval(), torch.zeros(2, 7, 6)
    for limits in ({"units": dict.fromkeys(ATTENTION, 2)}, {"macs": 0.3}):
        small = hc.prune(model, example, sequences(), cross_entropy, stages=2, **limits)
        plan = hc.CompactionPlan.of(small)
        heads = [len(plan.groups[name].kept) for name in ATTENTION]
        assert max(heads) <= 2 or sum(heads) < 8
        assert [layer.self_attn.num_heads for layer in small.layers.layers] == heads
        assert plan.form == "module"
        plain = plan.apply(model).eval()
        gaps = [(each(sequences()[0][0]) - model(sequences()[0][0])).square().mean()
                for each in (small, plain)]  # fmt: skip
        assert gaps[0] < gaps[1]


def test_a_budget_counts_attention_heads() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(Heads(), torch.randn(2, 7, 6))
    assert {group.kind for group in gated.groups} == {"attention head", "neuron"}
    budget = hc.Budget(gated, macs=0.4)
    optimizer = torch.optim.Adam(gated.parameters(), 1e-3)
    for x, y in sequences() * 3:
        loss = nn.functional.cross_entropy(gated(x), y) + budget()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
    small = hc.compact(gated, budget=budget, batches=sequences(), loss=cross_entropy)
    example = torch.zeros(2, 7, 6)
    share = hc.count(small, example).macs / hc.count(Heads(), example).macs
    assert 0.3 < share <= 0.4


def test_heads_leave_while_a_model_trains() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(Heads(), torch.randn(2, 7, 6))
    optimizer = torch.optim.Adam(gated.parameters(), 1e-3)
    x, y = sequences()[0]
    for kept in (2, 1):
        with torch.no_grad():
            for name in ATTENTION:
                (group,) = (group for group in gated.groups if group.name == name)
                gated.gates.log_alpha[group.slice].copy_(
                    torch.where(torch.arange(group.units) < kept, 3.0, -20.0)
                )
        before = gated.eval()(x)
        assert hc.shrink(gated, optimizer, pays=0.01)
        torch.testing.assert_close(gated(x), before)
        assert [layer.self_attn.num_heads for layer in gated.model.layers.layers] == [kept] * 2
        loss = nn.functional.cross_entropy(gated.train()(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small = hc.compact(gated)
    assert hc.count(small, torch.zeros(2, 7, 6)).macs == gated.delivered("macs")
    torch.testing.assert_close(small.eval()(x), gated.eval()(x))


def test_uniform_layers() -> None:
    """Both layers keep equally many units, and the limit holds."""
    torch.manual_seed(0)
    layers = (part for _ in range(3) for part in (nn.Linear(16, 16), nn.ReLU()))
    model, x = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 2)), torch.randn(64, 8)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x[:, :2]).square().mean()

    small = hc.prune(model, x[:1], x.split(16), loss, macs=0.5, uniform=True, progress=False)
    widths = {len(kept.kept) for kept in hc.CompactionPlan.of(small).groups.values()}
    assert len(widths) == 1
    assert 0.4 < hc.count(small, x[:1]).macs / hc.count(model, x[:1]).macs <= 0.5
