"""One network in training."""

import torch

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete_paper.training.learner import Learner, Recipe


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


def test_the_mean_counts_every_epoch_since_its_beginning_alike() -> None:
    one = Learner("", 0, torch.nn.Linear(1, 1, bias=False), Recipe(swa=2))
    running = one.average.module.weight
    for epoch, weight in enumerate([9.0, 9.0, 1.0, 2.0, 6.0], start=1):
        running.data.fill_(weight)
        one.end_epoch(epoch, steps=10)
        assert one.taken == 10 * epoch
        assert one.averaged.weight.item() == {1: 9, 2: 9, 3: 1, 4: 1.5, 5: 3}[epoch]
    other = Learner("", 1, torch.nn.Linear(1, 1, bias=False), Recipe(swa=2))
    other.restore({name: value.clone() for name, value in one.state().items()})
    assert other.averaged.weight.item() == 3
    other.end_epoch(6, steps=10)
    assert other.averaged.weight.item() == 3.75


def test_gates_that_shut_while_weights_are_averaged_are_shut() -> None:
    gated = hc.attach_gates(MLP(), torch.zeros(2, 784), sites=["fc1:in"])
    one = Learner("", 0, gated, Recipe(swa=1))
    running = one.average.module
    for epoch in range(2, 12):
        running.gates.log_alpha.data.fill_(5.0)
        one.end_epoch(epoch, steps=10)
    running.gates.log_alpha.data[:700] = -5.0
    one.end_epoch(12, steps=10)
    assert one.averaged.units_left() == (84,)
