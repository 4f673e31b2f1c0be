"""Times of single operators over a grid of widths, measured once per machine and kept.

Operators are timed one after the other in the order of the forward, one grid point of each in
turn, so that they find caches much as they do in the forward itself: the sum of their times is
then near that of the forward, which it is not where one is called again and again. The forward is
timed alone, before and after them.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn

from hardconcrete.cost.count import tensors_in
from hardconcrete.cost.latency.operations import Operation
from hardconcrete.cost.latency.timing import Call, interleaved, undisturbed, wait_for

BLOCK = 16
"""Channels that kernels take at a time: one more than a multiple takes another block."""

BLOCKS = 4
"""How many steps at most are looked at along one width."""

NARROW = (1, 4, 8)
"""Widths below a block that are looked at."""

PASSES = 3
"""How often all is timed: a machine that others use is slow for seconds at times."""

REPEATS = 5
"""Timed calls of an operator at each point of its grid, at least, in each pass."""

SECONDS = 3.0
"""How long a pass takes, at least."""

MODULE_CALL = "module call"
"""The name of what the call of a module costs besides its operators."""

FORWARD = "forward"
"""The name of the whole."""


@dataclass(frozen=True)
class Grid:
    """Times of an operator.

    Args:
        knots: sizes of each of its widths, at most two; none where its time is taken as constant,
            or as linear in the widths that it has more.
        ms: milliseconds at their combinations, the last width running fastest; none where it does
            not run on invented numbers.
    """

    knots: tuple[tuple[int, ...], ...]
    ms: tuple[float, ...]


def edges(dense: int) -> list[int]:
    """Widths at which a kernel has no channel to spare.

    Example:
        >>> edges(50), edges(16), edges(500)
        ([1, 4, 8, 16, 32, 48, 50], [1, 4, 8, 16], [1, 4, 8, 128, 256, 384, 500])
    """
    block = BLOCK * math.ceil(dense / (BLOCK * BLOCKS))
    return sorted({*(n for n in NARROW if n < dense), *range(block, dense, block), dense})


def knots(dense: int) -> tuple[int, ...]:
    """The edges, and what lies on either side of whole blocks: there another kernel may run.

    Example:
        >>> knots(50)
        (1, 4, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 50)
    """
    whole = [n for n in edges(dense) if n % BLOCK == 0]
    near = {n + side for n in whole for side in (-1, 1) if n + side <= dense}
    return tuple(sorted(near | {*edges(dense)}))


def machine(device: torch.device) -> str:
    """The device, the version of torch and the threads: what times depend on."""
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
    """Where times are kept: under ``$XDG_CACHE_HOME``, or else ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = "".join(c if c.isalnum() or c in ".+" else "-" for c in machine(device))
    return cache / "hardconcrete" / "latency" / f"{name}.json"


def kept(file: Path) -> dict[str, dict[str, Grid]]:
    """What a file holds by model; nothing where there is none, or none that can be read."""
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


def keep(file: Path, models: dict[str, dict[str, Grid]]) -> None:
    """Write a file anew, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    written = {
        model: {name: asdict(grid) for name, grid in grids.items()}
        for model, grids in models.items()
    }
    draft.write_text(json.dumps(written))
    draft.replace(file)


def timed(
    operations: Iterable[Operation], forward: Call, device: torch.device, repeats: int | None
) -> dict[str, Grid]:
    """The grid of every operation, by name, those of the forward and of the call of a module.

    Each point is timed so often, or in three passes of some seconds, of which the least counts.

    Example:
        >>> from hardconcrete.cost.latency.operations import Spec, Width
        >>> x = Spec((2, Width(0, 6)), torch.float32, torch.device("cpu"))
        >>> relu = Operation("", torch.ops.aten.relu.default, (x,), {})
        >>> grids = timed([relu], lambda: None, torch.device("cpu"), repeats=3)
        >>> grids[relu.name].knots, len(grids[relu.name].ms)
        (((1, 4, 6),), 3)
    """
    with torch.inference_mode():
        unique = list({one.name: one for one in operations}.values())
        points = {one.name: _points(one) for one in unique}
        once = partial(_timed, unique, points, forward, device)
        if repeats is not None:
            return once(repeats, 0.0)
        return _least([once(REPEATS, SECONDS) for _ in range(PASSES)])


def _least(passes: Sequence[dict[str, Grid]]) -> dict[str, Grid]:
    """Of every point the least time, for others only add to it."""
    return {
        name: Grid(grid.knots, tuple(map(min, zip(*(p[name].ms for p in passes), strict=True))))
        for name, grid in passes[0].items()
    }


def _timed(
    operations: Sequence[Operation],
    points: Mapping[str, Sequence[tuple[int, ...]]],
    forward: Call,
    device: torch.device,
    repeats: int,
    seconds: float,
) -> dict[str, Grid]:
    alone = partial(_times, [forward], device, 2 * repeats, seconds / 4)
    before = alone()
    empty = partial(nn.Identity(), torch.zeros(1, device=device))
    calls: list[tuple[tuple[str, int], Call]] = [((MODULE_CALL, 0), empty)]
    for k in range(max(map(len, points.values()), default=0)):
        for number, one in enumerate(operations):
            if k < len(points[one.name]):
                args, kwargs = one.at(points[one.name][k])
                calls.append(((one.name, k), partial(one.target, *args, **kwargs)))
            if k == 0:
                calls.append(((MODULE_CALL, number), empty))
    times = _times([call for _, call in calls], device, repeats, seconds)
    ms = dict(zip((name for name, _ in calls), times, strict=True))
    floor = statistics.median(ms[MODULE_CALL, k] for k in range(max(len(operations), 1)))
    whole = min(before + alone())
    found = {FORWARD: Grid((), (whole,)), MODULE_CALL: Grid((), (floor,))}
    for one in operations:
        own = [ms[one.name, k] for k in range(len(points[one.name]))]
        found[one.name] = _grid(one, own, floor)
    return found


def _times(
    calls: Sequence[Call], device: torch.device, repeats: int, seconds: float
) -> list[float]:
    """Of single calls; where the device runs behind, of ten in a row. Without the clock's own."""
    many = 1 if device.type == "cpu" else 10
    rows = [partial(_again, call, many) for call in (_nothing, *calls)]
    times = interleaved(rows, repeats, partial(wait_for, [device]), seconds)
    clock, *own = (undisturbed(each) / many for each in times)
    return [max(each - clock, 0.0) for each in own]


def _nothing() -> None:
    """What is called to see how long calling takes."""


def _again(call: Call, many: int) -> None:
    for _ in range(many):
        call()


def _points(one: Operation) -> list[tuple[int, ...]]:
    """The sizes to time: those of the grid, or the dense ones where it runs at no others."""
    dense = tuple(width.dense for width in one.widths)
    if not _runs(one, dense):
        return []
    grid = list(product(*map(knots, dense)))
    if len(dense) > 2 or _only_views(one, dense) or not all(_runs(one, at) for at in grid):
        return [dense]
    return grid


def _only_views(one: Operation, sizes: Sequence[int]) -> bool:
    if one.target._schema.is_mutable:
        return False
    given = one.at(sizes)
    memory = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
    results = tensors_in(one.target(*given[0], **given[1]))
    return all(tensor.untyped_storage()._cdata in memory for tensor in results)


def _runs(one: Operation, sizes: Sequence[int]) -> bool:
    args, kwargs = one.at(sizes)
    try:
        one.target(*args, **kwargs)
    except (RuntimeError, IndexError):  # sizes or indices are written into its arguments
        return False
    return True


def _grid(one: Operation, times: Sequence[float], floor: float) -> Grid:
    """What was timed; an operator that only runs as it is takes time as its widths are large."""
    dense = [width.dense for width in one.widths]
    lines = tuple(map(knots, dense))
    if len(dense) <= 2 and len(times) == math.prod(map(len, lines)):
        return Grid(lines, tuple(times))
    if not times or len(dense) > 2 or _only_views(one, dense):
        return Grid((), tuple(times))
    shares = [
        math.prod(n / d for n, d in zip(sizes, dense, strict=True)) for sizes in product(*lines)
    ]
    return Grid(lines, tuple(floor + max(times[0] - floor, 0.0) * share for share in shares))
