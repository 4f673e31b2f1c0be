"""Times of single operators over a grid of widths, measured once per machine and cached in a file.

Operators are timed in the order of the forward, one grid point of each in turn. The processor's
caches are then in a similar state as in the forward, so that the times add up to about that of the
forward. They do not if one operator is called many times in a row. The forward itself is timed
before and after the operators.
"""

import json
import math
import os
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn

from hardconcrete.cost.count import tensors_in
from hardconcrete.cost.latency.operations import Operation
from hardconcrete.cost.latency.timing import Call, first_quintile, interleaved, wait_for
from hardconcrete.errors import DataError, HardConcreteWarning
from hardconcrete.files import replace_file

CHANNEL_BLOCK = 16
"""Channels that kernels process at a time; one more channel takes another block."""

MAX_STEPS_PER_WIDTH = 4
"""The largest number of steps timed along one width."""

NARROW_WIDTHS = (1, 4, 8)
"""Widths below one block that are timed."""

PASSES = 3
"""The number of passes over all operators. On a shared machine some seconds are slow."""

MIN_REPEATS = 5
"""Timed calls of an operator at each grid point in each pass, at least."""

MIN_PASS_SECONDS = 3.0
"""Seconds that a pass takes, at least."""

MODULE_CALL = "module call"
"""The name of the time that calling a module takes, without its operators."""

FORWARD = "forward"
"""The name of the time of the whole forward."""


@dataclass(frozen=True)
class Grid:
    """Times of an operator.

    Args:
        knots: the timed sizes of each of its widths, at most two. Without knots its time is
            constant, or linear in its widths if it has more than two.
        ms: milliseconds at all combinations of knots, the last width varying fastest; empty if the
            operator does not run on invented numbers.
    """

    knots: tuple[tuple[int, ...], ...]
    ms: tuple[float, ...]


def block_edges(dense: int) -> list[int]:
    """Widths that fill the last block of channels.

    Example:
        >>> block_edges(50), block_edges(16), block_edges(500)
        ([1, 4, 8, 16, 32, 48, 50], [1, 4, 8, 16], [1, 4, 8, 128, 256, 384, 500])
    """
    block = CHANNEL_BLOCK * math.ceil(dense / (CHANNEL_BLOCK * MAX_STEPS_PER_WIDTH))
    return sorted({*(n for n in NARROW_WIDTHS if n < dense), *range(block, dense, block), dense})


def knots(dense: int) -> tuple[int, ...]:
    """The block edges and their neighbours, where another kernel may run.

    Example:
        >>> knots(50)
        (1, 4, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 50)
    """
    whole = [n for n in block_edges(dense) if n % CHANNEL_BLOCK == 0]
    near = {n + side for n in whole for side in (-1, 1) if n + side <= dense}
    return tuple(sorted(near | {*block_edges(dense)}))


def machine_name(device: torch.device) -> str:
    """Names the device, the version of torch and the number of threads. Times depend on these."""
    on_cpu = device.type == "cpu"
    name = _processor() if on_cpu else torch.cuda.get_device_name(device)
    threads = f" {torch.get_num_threads()} threads" if on_cpu else ""
    return f"{name} torch {torch.__version__}{threads}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return "cpu"


def cache_file(device: torch.device) -> Path:
    """The file of cached times, under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = "".join(c if c.isalnum() or c in ".+" else "-" for c in machine_name(device))
    return cache / "hardconcrete" / "latency" / f"{name}.json"


def read_cache(file: Path) -> dict[str, dict[str, Grid]]:
    """Read the grids of a file by model; an empty dict if the file is missing or unreadable."""
    try:
        return {
            model: {
                name: Grid(tuple(map(tuple, grid["knots"])), tuple(grid["ms"]))
                for name, grid in grids.items()
            }
            for model, grids in json.loads(file.read_text()).items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_cache(file: Path, models: dict[str, dict[str, Grid]]) -> None:
    """Write the file as a whole, or warn: without it the times are measured again."""
    written = {
        model: {name: asdict(grid) for name, grid in grids.items()}
        for model, grids in models.items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, lambda temporary: temporary.write_text(json.dumps(written)))
    except (OSError, DataError) as error:
        warnings.warn(f"times are not cached: {error}", HardConcreteWarning, stacklevel=4)


def time_grids(
    operations: Iterable[Operation], forward: Call, device: torch.device, repeats: int | None
) -> dict[str, Grid]:
    """Time every operation over its grid; return the grids by name.

    The forward and an empty module call have grids too. Each point is timed ``repeats`` times, or
    in three passes of some seconds, of which the fastest counts.

    Example:
        >>> from hardconcrete.cost.latency.operations import TensorSpec, Width
        >>> x = TensorSpec((2, Width(0, 6)), torch.float32, torch.device("cpu"))
        >>> relu = Operation("", torch.ops.aten.relu.default, (x,), {})
        >>> grids = time_grids([relu], lambda: None, torch.device("cpu"), repeats=3)
        >>> grids[relu.name].knots, len(grids[relu.name].ms)
        (((1, 4, 6),), 3)
    """
    with torch.inference_mode():
        unique = list({operation.name: operation for operation in operations}.values())
        points = {operation.name: _points(operation) for operation in unique}
        once = partial(_one_pass, unique, points, forward, device)
        if repeats is not None:
            return once(repeats, 0.0)
        return _fastest([once(MIN_REPEATS, MIN_PASS_SECONDS) for _ in range(PASSES)])


def _fastest(passes: Sequence[dict[str, Grid]]) -> dict[str, Grid]:
    """The least time of every point, because other processes only add time."""
    return {
        name: Grid(grid.knots, tuple(map(min, zip(*(p[name].ms for p in passes), strict=True))))
        for name, grid in passes[0].items()
    }


def _one_pass(
    operations: Sequence[Operation],
    points: Mapping[str, Sequence[tuple[int, ...]]],
    forward: Call,
    device: torch.device,
    repeats: int,
    seconds: float,
) -> dict[str, Grid]:
    """Time all points of all operations in turn, and the forward before and after."""
    time_forward = partial(_call_times, [forward], device, 2 * repeats, seconds / 4)
    before = time_forward()
    empty = partial(nn.Identity(), torch.zeros(1, device=device))
    calls: list[tuple[tuple[str, int], Call]] = [((MODULE_CALL, 0), empty)]
    for k in range(max(map(len, points.values()), default=0)):
        for number, operation in enumerate(operations):
            if k < len(points[operation.name]):
                args, kwargs = operation.at(points[operation.name][k])
                calls.append(((operation.name, k), partial(operation.target, *args, **kwargs)))
            if k == 0:
                calls.append(((MODULE_CALL, number), empty))
    times = _call_times([call for _, call in calls], device, repeats, seconds)
    ms = dict(zip((name for name, _ in calls), times, strict=True))
    floor = statistics.median(ms[MODULE_CALL, k] for k in range(max(len(operations), 1)))
    whole = min(before + time_forward())
    grids = {FORWARD: Grid((), (whole,)), MODULE_CALL: Grid((), (floor,))}
    for operation in operations:
        one_ms = [ms[operation.name, k] for k in range(len(points[operation.name]))]
        grids[operation.name] = _grid(operation, one_ms, floor)
    return grids


def _call_times(
    calls: Sequence[Call], device: torch.device, repeats: int, seconds: float
) -> list[float]:
    """Milliseconds per call, without the overhead of timing.

    On an asynchronous device ten calls in a row are timed together.
    """
    calls_in_a_row = 1 if device.type == "cpu" else 10
    rows = [partial(_repeat, call, calls_in_a_row) for call in (_empty_call, *calls)]
    times = interleaved(rows, repeats, partial(wait_for, [device]), seconds)
    overhead, *ms = (first_quintile(each) / calls_in_a_row for each in times)
    return [max(each - overhead, 0.0) for each in ms]


def _empty_call() -> None:
    """Called to time the overhead of a call."""


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def _points(operation: Operation) -> list[tuple[int, ...]]:
    """The sizes to time: those of the grid, or only the dense ones if it cannot run at others."""
    dense = tuple(width.dense for width in operation.widths)
    if not _can_run(operation, dense):
        return []
    grid = list(product(*map(knots, dense)))
    if (
        len(dense) > 2
        or _only_views(operation, dense)
        or not all(_can_run(operation, at) for at in grid)
    ):
        return [dense]
    return grid


def _only_views(operation: Operation, sizes: Sequence[int]) -> bool:
    """Whether all results share memory with the arguments, so that no data is moved."""
    if operation.target._schema.is_mutable:
        return False
    args, kwargs = operation.at(sizes)
    memory = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    results = tensors_in(operation.target(*args, **kwargs))
    return all(tensor.untyped_storage()._cdata in memory for tensor in results)


def _can_run(operation: Operation, sizes: Sequence[int]) -> bool:
    args, kwargs = operation.at(sizes)
    try:
        operation.target(*args, **kwargs)
    except (RuntimeError, IndexError):  # sizes or indices are written into its arguments
        return False
    return True


def _grid(operation: Operation, times: Sequence[float], floor: float) -> Grid:
    """The grid of measured times.

    For an operator that only runs at its dense sizes, the time is scaled with its widths.
    """
    dense = [width.dense for width in operation.widths]
    lines = tuple(map(knots, dense))
    if len(dense) <= 2 and len(times) == math.prod(map(len, lines)):
        return Grid(lines, tuple(times))
    if not times or len(dense) > 2 or _only_views(operation, dense):
        return Grid((), tuple(times))
    shares = [
        math.prod(n / d for n, d in zip(sizes, dense, strict=True)) for sizes in product(*lines)
    ]
    return Grid(lines, tuple(floor + max(times[0] - floor, 0.0) * share for share in shares))
