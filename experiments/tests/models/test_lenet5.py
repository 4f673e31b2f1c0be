import math

import pytest
import torch

from hardconcrete.demo import MLP
from hardconcrete_paper.models import LeNet5


@pytest.mark.parametrize(("model", "parameters"), [(MLP(), 266_610), (LeNet5(), 431_080)])
def test_sizes_of_the_paper(model: torch.nn.Module, parameters: int) -> None:
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_he_normal_weights_and_zero_biases() -> None:
    layer = MLP().fc1
    assert (layer.bias == 0).all()
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 784), rel=0.02)
