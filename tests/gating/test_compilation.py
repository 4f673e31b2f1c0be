import copy
import gc
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tanh
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import GateError
from hardconcrete.gating.checkpointing import Draws
from hardconcrete.gating.compilation import _digest, cacheable

Loss = Callable[[hc.GatedModel, Tensor], Tensor]


class Regions(nn.Module):
    """Layers that run one by one, as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.run: Callable[..., Tensor] = _region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def _region(layer: nn.Module, x: Tensor) -> Tensor:
    return tanh(layer(x))


def slopes(
    use: Loss,
    *,
    compiled: bool = False,
    inner: bool = False,
    outer: bool = False,
    sample: Any = "batch",
) -> list[Tensor]:
    """Gradients of a loss, with a checkpoint inside of the compiled layers or around them."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Regions()
    sites = ["layers.0:in", "layers.1:in"]
    gated = hc.attach_gates(model, torch.zeros(2, 6), sites=sites, sample=sample)
    if inner:
        model.run = partial(checkpoint, _region, use_reentrant=False)
    if compiled:
        model.run = torch.compile(model.run, backend="aot_eager")
    if outer:
        model.run = partial(checkpoint, model.run, use_reentrant=False)
    torch.manual_seed(2)
    loss = use(gated, torch.randn(4, 6)).square().sum()
    if loss.requires_grad:
        loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in gated.parameters()]


def assert_same(use: Loss, **how: Any) -> None:
    expected = slopes(use, sample=how.get("sample", "batch"))
    assert any(slope.any() for slope in expected)
    torch.testing.assert_close(slopes(use, **how), expected)


def once(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x)


def twice(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x) + gated(0.5 * x)


def own_output(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(gated(x))


def frozen(gated: hc.GatedModel, x: Tensor) -> Tensor:
    gated.freeze_gates()
    return gated(x)


def inside_another_draw(gated: hc.GatedModel, x: Tensor) -> Tensor:
    result = gated(x)
    with gated.draw(len(x)):
        gated.model(x)
        result.sum().backward(retain_graph=True)
    return result


def inside_its_draw(gated: hc.GatedModel, x: Tensor) -> Tensor:
    with gated.draw():
        gated.model(x).square().sum().backward(retain_graph=True)
    return x


def parts_of_a_draw(gated: hc.GatedModel, x: Tensor) -> Tensor:
    with gated.draw():
        for part in x.split(2):
            gated.model(part).square().sum().backward(retain_graph=True)
    return x


@pytest.mark.parametrize("use", [once, twice, own_output, frozen, inside_another_draw])
def test_layers_compiled_on_their_own(use: Loss) -> None:
    assert_same(use, compiled=True)


def test_a_checkpoint_compiled_with_its_layer() -> None:
    """The recomputation is part of the compiled backward, and runs outside of the call."""
    for use in (once, twice, own_output, inside_another_draw):
        assert_same(use, compiled=True, inner=True)


def test_compiled_layers_recomputed_in_their_own_draw() -> None:
    assert_same(inside_its_draw, compiled=True, outer=True)
    assert_same(parts_of_a_draw, compiled=True, outer=True)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (once, "Compile an activation checkpoint"),
        (frozen, "Compile an activation checkpoint"),
        (inside_another_draw, "with other gates than in their forward"),
    ],
)
def test_compiled_layers_recomputed_elsewhere_are_refused(use: Loss, words: str) -> None:
    """They would see no draw, or another one."""
    with pytest.raises(GateError, match=words):
        slopes(use, compiled=True, outer=True)


def test_a_recomputation_that_is_not_by_torch_is_refused_in_another_draw() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.run = run
            ctx.save_for_backward(x)
            return run(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return None, *torch.autograd.grad(ctx.run(x), x, *gradients)

    gated = hc.attach_gates(nn.Linear(6, 6), torch.zeros(2, 6), sites=[":in"])
    run = torch.compile(gated.model, backend="aot_eager")
    with gated.draw():
        result = Again.apply(run, torch.ones(2, 6, requires_grad=True))
    with gated.draw(), pytest.raises(GateError, match=r"finds 0 draws|than in their forward"):
        result.sum().backward()


@pytest.mark.parametrize("x", [torch.ones(2, 6), torch.ones(2, 6, requires_grad=True)])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_compiled_layers_in_a_reentrant_checkpoint_are_refused(x: Tensor) -> None:
    gated = hc.attach_gates(nn.Linear(6, 6), torch.zeros(2, 6), sites=[":in"])
    run = torch.compile(gated.model, backend="aot_eager")
    with gated.draw(), pytest.raises(GateError, match="use_reentrant=False"):
        checkpoint(run, x, use_reentrant=True)
    with gated.draw(), torch.no_grad():
        run(x)


def test_compiled_and_eager_checkpoints_in_parts_of_a_draw() -> None:
    """After an eager recomputation the call goes on: what is compiled then belongs to it."""
    gated = hc.attach_gates(Regions(), torch.zeros(2, 6), sites=["layers.0:in", "layers.1:in"])
    compiled = torch.compile(_region, backend="aot_eager")

    def found(checkpointed: bool) -> list[Tensor]:
        runs = dict.fromkeys(gated.model.layers, _region)
        if checkpointed:
            first, second = gated.model.layers
            runs = {first: partial(checkpoint, compiled, use_reentrant=False)}
            runs |= {second: partial(checkpoint, _region, use_reentrant=False)}
        gated.model.run = lambda layer, x: runs[layer](layer, x)
        torch.manual_seed(2)
        gated.zero_grad()
        with torch._functorch.config.patch(donated_buffer=False):  # graphs are retained
            parts_of_a_draw(gated, torch.randn(4, 6))
        return [p.grad.clone() for p in gated.parameters() if p.grad is not None]

    torch.testing.assert_close(found(True), found(False))


def test_compiled_layers_after_an_eager_recomputation_frozen_since_are_refused() -> None:
    gated = hc.attach_gates(Regions(), torch.zeros(2, 6), sites=["layers.0:in", "layers.1:in"])
    first, second = gated.model.layers
    x = torch.randn(4, 6)
    compiled = torch.compile(_region, backend="aot_eager")
    with gated.draw():
        checkpoint(_region, second, x, use_reentrant=False).sum().backward(retain_graph=True)
        result = checkpoint(compiled, first, x, use_reentrant=False).sum()
    gated.freeze_gates()
    with gated.draw(), pytest.raises(GateError, match="than in their forward"):
        result.backward()


def test_a_compiled_checkpoint_of_gates_that_do_not_learn() -> None:
    def untaught(gated: hc.GatedModel, x: Tensor) -> Tensor:
        gated.gates.log_alpha.requires_grad_(False)
        return gated(x)

    assert_same(untaught, compiled=True, inner=True)


def test_a_compiled_checkpoint_outlives_its_model() -> None:
    def called(x: Tensor) -> Tensor:
        gated = hc.attach_gates(nn.Linear(6, 6), torch.zeros(2, 6), sites=[":in"])
        gated.freeze_gates()  # a draw of gates that learn would keep them
        layer = torch.compile(
            lambda x: checkpoint(gated.model, x, use_reentrant=False), backend="aot_eager"
        )
        with gated.draw():
            return layer(x)

    x = torch.ones(2, 6, requires_grad=True)
    before, result = {*Draws.numbered}, called(x)
    torch._dynamo.reset()
    gc.collect()
    assert before >= {*Draws.numbered}, "the model is gone"
    result.sum().backward()
    assert x.grad is not None


def test_copies_are_compiled_for_draws_of_their_own() -> None:
    gated = hc.attach_gates(nn.Linear(6, 6), torch.zeros(2, 6), sites=[":in"])
    copies = [copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))]
    numbers = {each.gates.draws.number for each in (gated, *copies)}
    assert len(numbers) == 3
    assert numbers <= {*Draws.numbered}


def test_one_graph_that_draws_for_itself_asks_nothing() -> None:
    """Nothing outside of it can have drawn, and nothing keeps it from being fused."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    gated = hc.attach_gates(nn.Linear(6, 6), torch.zeros(2, 6), sites=[":in"])
    torch.compile(gated, backend=backend, fullgraph=True)(torch.ones(2, 6))
    with gated.draw():
        torch.compile(gated.model, backend=backend, fullgraph=True)(torch.ones(2, 6))
    assert ["check_draw" in code for code in graphs] == [False, True]


def test_gates_of_every_example_are_checked_too() -> None:
    assert_same(once, compiled=True, sample="example")
    with pytest.raises(GateError, match="than in their forward"):
        slopes(inside_another_draw, compiled=True, outer=True, sample="example")


def test_compiled_code_outside_of_a_draw_is_refused() -> None:
    gated = hc.attach_gates(nn.Linear(6, 2), torch.zeros(2, 6), sites=[":in"])
    run = torch.compile(gated.model, backend="aot_eager")
    with pytest.raises(GateError, match="gates have no value here"):
        run(torch.ones(2, 6))
    with gated.draw():
        assert run(torch.ones(2, 6)).requires_grad


def test_compiled_code_is_known_by_all_source_there_is(tmp_path: Path) -> None:
    digests = set()
    for content in ({"a": "1\n", "b": "2\n"}, {"a": "1\n2\n", "b": ""}, {"a": "1\n", "c": "2\n"}):
        shutil.rmtree(tmp_path)
        (tmp_path / "inside").mkdir(parents=True)
        for name, text in content.items():
            (tmp_path / "inside" / f"{name}.py").write_text(text)
        digests.add(_digest(tmp_path))
    assert len(digests) == 3


def test_without_source_compiled_code_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.pyc").touch()
    (tmp_path / ".#module.py").symlink_to("an editor")  # which leads nowhere
    assert _digest(tmp_path) == _digest(tmp_path / "archive.zip" / "package") == ""
    assert cacheable()
    monkeypatch.setattr("hardconcrete.gating.compilation._SOURCE", "")
    assert cacheable() == {}


def test_without_torchs_option_compiled_code_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardconcrete.gating.compilation._MARKED", "of_another_torch")
    assert cacheable() == {}
