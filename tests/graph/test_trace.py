"""A trace does not change the model, and explains what it cannot trace."""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import hardconcrete as hc
from hardconcrete.errors import TraceError
from hardconcrete.graph.trace import at_least_two_examples, trace
from tests.zoo import REFUSED


class Net(nn.Module):
    """Batch norm, dropout and attention: statistics, random numbers and a fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.layer = nn.TransformerEncoderLayer(8, 2, 14, batch_first=True)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.layer(self.drop(self.norm(self.fc1(x)))[:, None])[:, 0])


@pytest.mark.parametrize("training", [False, True])
def test_nothing_changes(training: bool) -> None:
    model = Net().train(training)
    model.drop.train(not training)
    model.fc1.weight.requires_grad_(False)
    model.fc2.weight.grad = torch.ones(4, 8)
    model.norm.running_mean.uniform_()
    before = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    random, x = torch.get_rng_state(), torch.randn(2, 6)
    torch.set_rng_state(random)
    with torch.no_grad():
        hc.find_groups(model, x)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.backends.mha.get_fastpath_enabled()
    assert [module.training for module in model.modules()] == modes
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new), name
        assert old.requires_grad == new.requires_grad, name
        assert (new.grad is None) == (name != "fc2.weight"), name
    for old, new in zip(before.buffers(), model.buffers(), strict=True):
        assert torch.equal(old, new)


def test_modes_come_back_after_a_failure() -> None:
    _, build, inputs, _ = REFUSED[0]
    model = build().train()
    with pytest.raises(TraceError):
        trace(model, inputs(2)[0])
    assert all(module.training for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(("name", "build", "inputs", "words"), REFUSED, ids=lambda v: str(v)[:12])
def test_trace_errors_explain_the_cause(name: str, build, inputs, words: str) -> None:
    args, kwargs = inputs(2)
    with pytest.raises(TraceError, match=r"cannot be traced by torch\.export") as refused:
        hc.find_groups(build(), args, kwargs)
    assert words in str(refused.value).lower(), name


def test_a_forward_that_depends_on_data_gets_advice() -> None:
    _, build, inputs, _ = REFUSED[0]
    with pytest.raises(TraceError, match=r"use torch\.where or torch\.cond"):
        hc.find_groups(build(), *inputs(2))


def test_threads_wait_for_each_other() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with ThreadPoolExecutor(3) as pool:
        graphs = list(pool.map(lambda _: trace(model, (torch.zeros(2, 4),)), range(6)))
    assert len({str(graph.graph) for graph in graphs}) == 1
    assert not fx.config.do_not_emit_stack_traces


def test_recurrent_layers_trace_without_a_warning() -> None:
    layer = nn.LSTM(6, 5, batch_first=True)
    flat = [id(weight) for weight in layer._flat_weights]
    trace(layer, (torch.randn(2, 3, 6),))
    assert [id(weight) for weight in layer._flat_weights] == flat


def test_the_graph_runs_at_another_batch_size_on_the_models_parameters() -> None:
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU()), torch.randn(5, 6)
    graph = trace(model, (torch.randn(1, 6),), sizes="any batch")
    model[0].weight.data.mul_(2)
    assert torch.equal(graph(x), model(x))


def test_the_graph_runs_at_another_length() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True).eval()
    graph = trace(model, (torch.randn(2, 5, 8),), sizes="any")
    for shape in ((3, 9, 8), (1, 3, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(graph(x), model(x))


class Compares(nn.Module):
    """Takes another way where two inputs are one tensor."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * x if x is y else x + y


def test_inputs_that_are_one_tensor_are_traced_as_two() -> None:
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    assert torch.equal(trace(Compares(), (x, x))(x, y), x)


def test_single_examples_are_doubled_and_others_are_not() -> None:
    one = at_least_two_examples(
        ((torch.zeros(1, 6),), {"b": torch.zeros(1), "n": 3, "s": torch.tensor(2)})
    )
    assert one[0][0].shape == (2, 6)
    assert (one[1]["b"].shape, one[1]["n"], one[1]["s"].shape) == ((2,), 3, ())
    assert at_least_two_examples(((torch.zeros(3, 6), torch.zeros(1)), {}))[0][1].shape == (1,)


@pytest.mark.skipif(not hasattr(fx.config, "do_not_emit_stack_traces"), reason="an older torch")
def test_tracing_stores_no_tracebacks_and_restores_the_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for before in (False, True):
        monkeypatch.setattr(fx.config, "do_not_emit_stack_traces", before)
        graph = trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), (torch.zeros(2, 3),))
        assert fx.config.do_not_emit_stack_traces is before
        assert not any(node.stack_trace for node in graph.graph.nodes)


class Cache:
    """An output like that of a language model, which torch.export does not support."""

    __slots__ = ("layers", "seen")

    def __init__(self, keys: Tensor) -> None:
        self.layers, self.seen = [SimpleNamespace(keys=keys)], {keys.dim()}


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.keys, self.down = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.up(x).relu()
        return {"logits": self.down(hidden), "cache": Cache(self.keys(hidden))}


def test_tensors_inside_an_unknown_object_are_outputs() -> None:
    found = hc.find_groups(Cached(), torch.randn(2, 4))
    assert [(group.name, group.units) for group in found.groups] == [("up", 8)]
    assert "keys" in str(found), "its 6 units are an output, and fixed"


def test_a_model_that_returns_an_unknown_object_is_pruned() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)["logits"].square().mean()

    batches = torch.randn(4, 8, 4)
    small = hc.prune(Cached(), batches[0], batches.unbind(), loss, macs=0.5)
    assert small.up.out_features == 4
    assert type(small(batches[0])["cache"]) is Cache


def test_a_graph_that_replaces_the_model_returns_no_unknown_object() -> None:
    with pytest.raises(TraceError, match=r"use_cache=False among their inputs"):
        trace(Cached(), (torch.randn(2, 4),), sizes="any batch")


class TakesMapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.down(self.up(batch["x"]))


def test_a_model_that_takes_one_mapping() -> None:
    batch = {"x": torch.ones(2, 4)}
    with pytest.raises(TraceError, match=r"pass it in a tuple, \(batch,\)"):
        hc.find_groups(TakesMapping(), batch)
    assert hc.find_groups(TakesMapping(), (batch,)).names == ("up",)


class Caching(nn.Module):
    """Returns its keys, unless its configuration says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.keys, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        keys = self.keys(x)
        return (self.down(keys), Cache(keys)) if self.config.use_cache else (self.down(keys),)


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_a_model_is_traced_without_its_cache(use_cache: bool | None) -> None:
    model = Caching()
    model.config.use_cache = use_cache
    assert hc.find_groups(nn.Sequential(model), torch.ones(2, 4)).names == ("0.keys",)
    assert model.config.use_cache is use_cache


def test_the_cache_is_on_again_after_an_error() -> None:
    model = Caching()
    with pytest.raises(TraceError):
        trace(model, (torch.ones(2, 5),))
    assert model.config.use_cache is True


class Unused(nn.Module):
    """Weights of attention are made and not used, and a layer is called for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2)
        self.extra = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attend(x, x, x)
        self.extra(x).relu()
        return mixed


def test_results_that_nothing_uses_are_erased_unless_a_layer_makes_them() -> None:
    graph = trace(Unused(), (torch.randn(3, 2, 4),))
    targets = {str(node.target) for node in graph.graph.nodes}
    assert "extra.weight" in targets
    assert not {"aten.mean.dim", "aten.relu.default"} & targets
    assert graph(torch.randn(3, 2, 4)).shape == (3, 2, 4)
