import itertools

import pytest
import torch

from hardconcrete.paper.flops import lenet5_macs, mlp_macs

LENET = {"conv1:out": 20, "conv2:out": 50, "fc1:in": 800, "fc2:in": 500}


def some(count: int, size: int) -> torch.Tensor:
    return (torch.arange(size) < count).double()


def test_the_mlp_that_is_left() -> None:
    alive = {"fc1:in": some(266, 784), "fc2:in": some(88, 300), "fc3:in": some(33, 100)}
    assert mlp_macs(alive) == 266 * 88 + 88 * 33 + 33 * 10


def test_a_map_without_open_inputs_is_dead() -> None:
    inputs = torch.zeros(50, 16)
    inputs[:18, :3] = 1
    alive = {
        "conv1:out": some(9, 20),
        "conv2:out": some(40, 50),
        "fc1:in": inputs.flatten(),
        "fc2:in": some(25, 500),
    }
    expected = 24 * 24 * 25 * 9 + 8 * 8 * 25 * 9 * 18 + 54 * 25 + 25 * 10
    assert lenet5_macs(alive) == expected


def test_an_input_of_a_shut_map_is_dead() -> None:
    alive = {name: torch.ones(size) for name, size in LENET.items()}
    alive["conv2:out"] = some(10, 50)
    assert lenet5_macs(alive) == 24 * 24 * 25 * 20 + 64 * 25 * 20 * 10 + 160 * 500 + 5000


def test_expectations_are_those_of_independent_gates() -> None:
    """All patterns of four gates, the others fixed, weighted by their probabilities."""
    alive = {name: torch.zeros(size) for name, size in LENET.items()}
    alive["conv1:out"][:3] = 1
    places = [("conv2:out", 0), ("fc1:in", 0), ("fc1:in", 1), ("fc2:in", 7)]
    probabilities = [0.3, 0.6, 0.9, 0.2]
    expected = 0.0
    for pattern in itertools.product([0, 1], repeat=4):
        weight = 1.0
        for (name, place), p, value in zip(places, probabilities, pattern, strict=True):
            alive[name][place] = value
            weight *= p if value else 1 - p
        expected += weight * lenet5_macs(alive)
    for (name, place), p in zip(places, probabilities, strict=True):
        alive[name][place] = p
    assert lenet5_macs(alive) == pytest.approx(expected, rel=1e-6)
