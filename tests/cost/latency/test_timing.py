import pytest

from hardconcrete.cost.latency import timing
from hardconcrete.cost.latency.timing import WARMUP_CALLS, first_quintile, interleaved, quartiles


class Clock:
    """A clock that moves only on request."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "perf_counter", made)
    return made


def test_median_and_quartiles(clock: Clock) -> None:
    seconds = iter([100] * WARMUP_CALLS + [5, 1, 2, 4, 3])

    def call() -> None:
        clock.now += next(seconds)

    (times,) = interleaved([call], repeats=5)
    assert times == [5000, 1000, 2000, 4000, 3000]
    assert quartiles(times) == (3000, 2000, 4000)


def test_timing_continues_for_the_given_seconds(clock: Clock) -> None:
    """The requested rounds, and more until the seconds have passed."""

    def call() -> None:
        clock.now += 1

    for seconds, rounds in ((0.0, 3), (2.0, 3), (9.0, 5)):  # of two calls, a second each
        found = interleaved([call, call], repeats=3, seconds=seconds)
        assert [len(times) for times in found] == [rounds, rounds]


def test_the_clock_waits_for_the_device(clock: Clock) -> None:
    """Work that was started before does not count; work that the call started does."""
    pending = 0.0

    def call() -> None:
        nonlocal pending
        pending += 3

    def wait() -> None:
        nonlocal pending
        clock.now, pending = clock.now + pending, 0

    assert interleaved([call], 2, wait) == [[3000, 3000]]


def test_every_other_round_is_reversed() -> None:
    seen: list[str] = []
    interleaved([lambda: seen.append("a"), lambda: seen.append("b")], repeats=2)
    assert seen[2 * WARMUP_CALLS :] == ["a", "b", "b", "a"]


def test_the_first_quintile_ignores_slow_calls() -> None:
    assert first_quintile([5.0]) == 5.0
    assert first_quintile([3.0, 1.0]) == 1.0
    assert first_quintile([*range(100, 0, -1)]) == 20
