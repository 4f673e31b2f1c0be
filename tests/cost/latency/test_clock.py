"""Grids of times: which points are timed, the cache, and operators that do not run."""

import json
from pathlib import Path

import pytest
import torch

from hardconcrete.cost.latency import clock
from hardconcrete.cost.latency.clock import (
    FORWARD,
    MODULE_CALL,
    Grid,
    block_edges,
    cache_file,
    knots,
    read_cache,
    time_grids,
    write_cache,
)
from hardconcrete.cost.latency.operations import Operation, TensorSpec, Width
from hardconcrete.errors import HardConcreteWarning

CPU = torch.device("cpu")
aten = torch.ops.aten


def spec(*shape: int | Width) -> TensorSpec:
    return TensorSpec(shape, torch.float32, CPU)


@pytest.mark.parametrize("dense", [2, 3, 10, 16, 50, 64, 500, 4096])
def test_knots_span_the_width_and_hold_the_edges(dense: int) -> None:
    found = knots(dense)
    assert found[0] == 1
    assert found[-1] == dense
    assert sorted(set(found)) == list(found)
    assert {*block_edges(dense)} <= {*found}
    assert len(found) <= 16


def test_a_grid_of_two_widths() -> None:
    a, b = Width(0, 20), Width(1, 6)
    one = Operation("", aten.linear.default, (spec(2, a), spec(b, a)), {})
    grids = time_grids([one, one], lambda: torch.zeros(77), CPU, repeats=3)
    assert set(grids) == {one.name, FORWARD, MODULE_CALL}
    assert grids[one.name].knots == (knots(20), knots(6))
    assert len(grids[one.name].ms) == len(knots(20)) * len(knots(6))
    assert all(ms > 0 for ms in grids[one.name].ms)


class Ticks:
    """A clock that ticks once for every entry of a result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def times(calls: list, *_: object) -> list[float]:
            return [float(call().numel()) for call in calls]

        monkeypatch.setattr(clock, "_call_times", times)


def test_times_are_at_their_grid_points(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks(monkeypatch)
    a, b = Width(0, 20), Width(1, 6)
    linear = Operation("", aten.linear.default, (spec(2, a), spec(b, a)), {})
    relu = Operation("", aten.relu.default, (spec(3, b),), {})
    grids = time_grids([linear, relu], lambda: torch.zeros(77), CPU, repeats=2)
    assert grids[FORWARD].ms == (77.0,)
    assert grids[relu.name].ms == tuple(3.0 * n for n in knots(6))
    assert grids[linear.name].ms == tuple(2.0 * n for _ in knots(20) for n in knots(6))


def test_an_operator_with_sizes_among_its_arguments_is_scaled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs at its own size alone; from there down to the cost of a call."""
    Ticks(monkeypatch)
    one = Operation("", aten.repeat.default, (spec(2, Width(0, 8)), [2, 1]), {})
    fixed = Operation("", aten.view_copy.default, (spec(2, Width(0, 8)), [16]), {})
    grids = time_grids([one, fixed], lambda: torch.zeros(77), CPU, repeats=2)
    assert grids[one.name].ms == tuple(4.0 * n for n in knots(8))
    assert grids[fixed.name].ms == pytest.approx([1 + 15 * n / 8 for n in knots(8)])


def test_views_and_many_widths_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks(monkeypatch)
    widths = [Width(k, 4 + k) for k in range(3)]
    view = Operation("", aten.flatten.using_ints, (spec(2, widths[0], 3), 1), {})
    joined = Operation("", aten.cat.default, ([spec(2, width) for width in widths], 1), {})
    grids = time_grids([view, joined], lambda: torch.zeros(77), CPU, repeats=2)
    assert grids[view.name] == Grid((), (24.0,))
    assert grids[joined.name] == Grid((), (30.0,))


def test_in_place_operators_are_no_views(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks(monkeypatch)
    one = Operation("", aten.relu_.default, (spec(3, Width(0, 8)),), {})
    assert time_grids([one], lambda: torch.zeros(77), CPU, repeats=2)[one.name].ms == tuple(
        3.0 * n for n in knots(8)
    )


def test_operators_that_fail_on_invented_numbers_have_no_time() -> None:
    one = Operation("", aten.linalg_cholesky.default, (spec(4, 4),), {})
    assert time_grids([one], lambda: torch.zeros(77), CPU, repeats=2)[one.name] == Grid((), ())


def test_the_cache_is_read_back(tmp_path: Path) -> None:
    grids = {"a model": {"relu": Grid(((1, 2),), (0.1, 0.2)), "call": Grid((), (0.5,))}}
    file = tmp_path / "deep" / "times.json"
    assert read_cache(file) == {}
    write_cache(file, grids)
    assert read_cache(file) == grids
    assert [path.name for path in file.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"relu": 3}', '{"a": {"relu": {"knots": [[1]]}}}'])
def test_an_unreadable_cache_is_empty(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    assert read_cache(file) == {}


def test_the_file_is_named_for_the_machine() -> None:
    name = cache_file(CPU).name
    assert f"{torch.get_num_threads()}-threads" in name
    assert torch.__version__ in name
    assert json.dumps(name)


def test_the_overhead_of_timing_does_not_count() -> None:
    calls = [lambda: None, lambda: sum(range(2000))]
    nothing, something = clock._call_times(calls, torch.device("cpu"), 50, 0.0)
    assert nothing < 0.001 < something


def test_the_fastest_of_several_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three passes was slow, and the forward was slow in the first."""
    one = Operation("", torch.ops.aten.relu.default, (spec(4),), {})
    passes = iter([(1.0, 9.0), (30.0, 2.0), (1.1, 3.0)])

    def one_pass(*_: object) -> dict[str, Grid]:
        own, whole = next(passes)
        return {one.name: Grid(((1, 4),), (own, 2 * own)), FORWARD: Grid((), (whole,))}

    monkeypatch.setattr(clock, "_one_pass", one_pass)
    found = time_grids([one], lambda: None, CPU, repeats=None)
    assert found == {one.name: Grid(((1, 4),), (1.0, 2.0)), FORWARD: Grid((), (2.0,))}


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(HardConcreteWarning, match=r"times are not cached: .*Not a directory"):
        write_cache(tmp_path / "file" / "inside" / "times.json", {})
