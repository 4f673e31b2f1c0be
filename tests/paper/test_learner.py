"""One network in training."""

import torch

import hardconcrete as hc
from hardconcrete.paper.learner import Learner, Recipe
from hardconcrete.paper.models import MLP


def test_the_average_of_the_authors_is_divided() -> None:
    gated = hc.attach_gates(MLP(), torch.zeros(2, 784), sites=["fc1:in"])
    one = Learner("", 0, gated, Recipe(averaging=0.9, divided_average=True))
    start = one.average.module.gates.log_alpha.clone()
    assert torch.equal(one.averaged.gates.log_alpha, start)
    one.taken = 2
    torch.testing.assert_close(one.averaged.gates.log_alpha, start / 0.19)
    assert torch.equal(one.average.module.gates.log_alpha, start)
    one.taken = 100_000
    assert torch.equal(one.averaged.gates.log_alpha, start)
