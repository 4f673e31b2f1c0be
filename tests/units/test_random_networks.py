"""Random networks, none of them wrong: 150 in every run, 2,000 in the slow tier."""

import pytest

from tests.units.verdict import NO_UNITS, verdict

CHUNK = 25
MOST_WITHOUT_UNITS = 0.14


def without_units(seeds: range) -> int:
    """How many of these networks have nothing to remove; every other one must be exact."""
    verdicts = [verdict(seed) for seed in seeds]
    failures = [found for found in verdicts if found not in ("module", "graph", NO_UNITS)]
    assert not failures, "\n".join(failures)
    return verdicts.count(NO_UNITS)


@pytest.mark.early
@pytest.mark.unwatched
@pytest.mark.parametrize("start", range(0, 150, CHUNK))
def test_150_are_exact(start: int) -> None:
    assert without_units(range(start, start + CHUNK)) <= 2 * MOST_WITHOUT_UNITS * CHUNK


@pytest.mark.slow
def test_2000_are_exact() -> None:
    assert without_units(range(1000, 3000)) <= MOST_WITHOUT_UNITS * 2000
