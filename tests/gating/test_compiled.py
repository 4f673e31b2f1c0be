from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, tanh
from torch.utils.checkpoint import CheckpointError, checkpoint

import hardconcrete as hc
from hardconcrete.errors import GateError

Loss = Callable[[hc.GatedModel, Tensor], Tensor]


class Regions(nn.Module):
    """Layers that are compiled one by one, each in a checkpoint or not."""

    def __init__(self, compiled: bool, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.checkpointed = checkpointed
        region = torch.compile(_region, backend="aot_eager", fullgraph=True)
        self.region = region if compiled else _region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(self.region, layer, x, use_reentrant=False)
            else:
                x = self.region(layer, x)
        return x


def _region(layer: nn.Module, x: Tensor) -> Tensor:
    return tanh(layer(x))


def slopes(use: Loss, compiled: bool, checkpointed: bool, sample: str = "batch") -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Regions(False, False)
    sites = ["layers.0:in", "layers.1:in"]
    gated = hc.attach_gates(model, torch.zeros(2, 6), sites=sites, sample=sample)  # type: ignore[arg-type]
    model.region, model.checkpointed = Regions(compiled, checkpointed).region, checkpointed
    torch.manual_seed(2)
    use(gated, torch.randn(4, 6)).square().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in gated.parameters()]


def once(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x)


def twice(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(x) + gated(0.5 * x)


def own_output(gated: hc.GatedModel, x: Tensor) -> Tensor:
    return gated(gated(x))


def frozen(gated: hc.GatedModel, x: Tensor) -> Tensor:
    gated.freeze_gates()
    return gated(x)


def frozen_since(gated: hc.GatedModel, x: Tensor) -> Tensor:
    result = gated(x)
    gated.freeze_gates()
    return result


def inside_another_draw(gated: hc.GatedModel, x: Tensor) -> Tensor:
    result = gated(x)
    with gated.draw():
        gated.model(x)
        result.sum().backward(retain_graph=True)
    return result


def inside_its_draw(gated: hc.GatedModel, x: Tensor) -> Tensor:
    with gated.draw():
        result = gated.model(x)
        result.sum().backward(retain_graph=True)
    return result


@pytest.mark.parametrize(
    "use",
    [once, twice, own_output, frozen, inside_another_draw, inside_its_draw],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_compiled_on_their_own(use: Loss, checkpointed: bool) -> None:
    """A recomputation runs the code of the forward, and sees its draw."""
    expected = slopes(use, compiled=False, checkpointed=False)
    assert any(slope.any() for slope in expected)
    torch.testing.assert_close(slopes(use, True, checkpointed), expected)


def test_compiled_layers_frozen_before_they_are_recomputed_are_refused() -> None:
    """By torch: the code that runs then keeps other tensors."""
    with pytest.raises(CheckpointError):
        slopes(frozen_since, True, True)


def test_gates_of_every_example_are_not_recomputed_by_compiled_layers() -> None:
    expected = slopes(once, compiled=False, checkpointed=False, sample="example")
    torch.testing.assert_close(slopes(once, True, False, "example"), expected)
    with pytest.raises(GateError, match="compile the checkpoint with them"):
        slopes(once, True, True, "example")


def test_compiled_code_outside_of_a_draw_is_refused() -> None:
    gated = hc.attach_gates(nn.Linear(6, 2), torch.zeros(2, 6), sites=[":in"])
    run = torch.compile(gated.model, backend="aot_eager")
    with pytest.raises(GateError, match="gates have no value here"):
        run(torch.ones(2, 6))
    with gated.draw():
        assert run(torch.ones(2, 6)).requires_grad
