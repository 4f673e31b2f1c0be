from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hardconcrete.demo.data import Images
from hardconcrete_paper.training.cudnn_trials import Convolutions, tried
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe

CPU = torch.device("cpu")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 6, 1, stride=2),
    )


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights of what is differentiated."""
    shapes: list[Any] = []
    real = Convolutions.differentiate

    def watched(self: Convolutions) -> None:
        real(self)
        shapes.extend([*weight.shape] for _, _, weight, *_ in self.kinds.values())

    monkeypatch.setattr(Convolutions, "differentiate", watched)
    return shapes


def test_each_kind_of_convolution_is_differentiated_once(differentiated: list[Any]) -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    with tried(lambda: model(x), CPU):
        pass
    assert differentiated == [[4, 3, 3, 3], [4, 4, 3, 3], [6, 4, 1, 1]]
    assert all(own.grad is None for own in model.parameters())


def test_what_is_differentiated_are_the_convolutions_of_a_training_step() -> None:
    """Layouts and precisions included: cuDNN chooses by them."""
    model, x = network().to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 8)
    x = x.to(memory_format=torch.channels_last)
    seen: set[Any] = set()

    class Steps(Convolutions):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.convolution_backward.default:
                parts = [each for each in args if isinstance(each, Tensor)]
                seen.add((*((t.shape, t.stride(), t.dtype) for t in parts), str(args[4:-1])))
            return func(*args, **(kwargs or {}))

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    with Steps():
        forward().square().sum().backward()
    expected = seen.copy()
    with torch.no_grad(), Convolutions() as found:
        forward()
    seen.clear()
    with Steps():
        found.differentiate()
    assert seen == expected


def test_trials_are_over_when_what_they_ran_beside_fails(differentiated: list[Any]) -> None:
    with pytest.raises(KeyError), tried(lambda: network()(torch.zeros(2, 3, 8, 8)), CPU):
        raise KeyError
    assert len(differentiated) == 3


def test_an_engine_tries_those_of_its_networks(differentiated: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    data = Images(torch.zeros(8, 1, 8, 8, dtype=torch.uint8), torch.arange(8), "blank")
    learner = Learner("dense", 0, model, Recipe(epochs=1, batch_size=4))
    engine = Engine([learner], data)
    before = {name: value.clone() for name, value in learner.state().items()}
    with engine._tried():
        pass
    assert differentiated == [[4, 1, 3, 3]]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in learner.state().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_are_tried_where_they_are_computed() -> None:
    device = torch.device("cuda")
    model, x = network().to(device), torch.randn(2, 3, 8, 8, device=device)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), tried(lambda: model(x), device):
        model(x).sum().backward()
    assert all(own.grad is not None for own in model.parameters())
