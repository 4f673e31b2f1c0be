"""Random networks, none of them wrong: 150 in every run, 2,000 in the slow tier."""

import os

import pytest

import hardconcrete as hc
from tests.exactness import assert_exact
from tests.structure.random_networks import random_network

CHUNK = 25
TOLERANCE = 1e-9
"""In float64, as a part of the output's scale."""

MOST_WITHOUT_UNITS = 0.14


def without_units(seeds: range) -> int:
    """How many of these networks have nothing to remove; every other one must be exact."""
    empty = 0
    for seed in seeds:
        network, inputs, script = random_network(seed)
        try:
            assert_exact(network, lambda batch, inputs=inputs: (inputs(batch), {}), seed, TOLERANCE)
        except hc.HardConcreteError as refusal:
            if "no units that could be removed" not in str(refusal):
                pytest.fail(f"seed {seed} was refused: {refusal}\n\n{script}")
            empty += 1
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\n\n{script}")
    return empty


@pytest.mark.parametrize("start", range(0, 150, CHUNK))
def test_150_are_exact(start: int) -> None:
    assert without_units(range(start, start + CHUNK)) <= 2 * MOST_WITHOUT_UNITS * CHUNK


@pytest.mark.slow
def test_2000_are_exact() -> None:
    seeds = range(int(os.environ.get("FIRST_SEED", "1000")), 3000)
    assert without_units(seeds) <= MOST_WITHOUT_UNITS * len(seeds)
