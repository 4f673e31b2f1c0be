"""Latency by gates: times of single operators, interpolated at the widths that are left."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hardconcrete.cost.example_inputs import Inputs, batch_size, resampled
from hardconcrete.cost.latency.clock import (
    FORWARD,
    MODULE_CALL,
    Grid,
    cache_file,
    edges,
    keep,
    kept,
    machine,
    timed,
)
from hardconcrete.cost.latency.operations import Operation, operations
from hardconcrete.cost.latency.timing import Call
from hardconcrete.cost.ledger import Ledger
from hardconcrete.cost.ledger_writer import LedgerWriter
from hardconcrete.errors import ArgumentError
from hardconcrete.units import Analysis
from hardconcrete.units.axis import Place

BELIEF = 0.75
"""How far the forward is believed against the sum of its operators: 1 makes them equal. Both are
estimates of what another network of these operators will take, and err in different ways."""

ESTIMATOR = "4"
"""Times in the cache are of one way to measure them."""


@dataclass(frozen=True, eq=False)
class Surface:
    """Piecewise bilinear functions of two sizes, one for each operator.

    Args:
        rows: the two sizes, by their number in the ledger; -1 where there is none.
        knots: sizes at which the functions are known.
        last: the place of the last knot of each.
        ms: milliseconds at pairs of knots.
    """

    rows: Tensor
    knots: Tensor
    last: Tensor
    ms: Tensor

    def __call__(self, sizes: Tensor) -> Tensor:
        """Milliseconds of every operator."""
        own = torch.cat([sizes, sizes.new_ones(1)])[self.rows]
        above = torch.searchsorted(self.knots, own.detach()[..., None].contiguous())[..., 0]
        above = torch.minimum(above.clamp(min=1), self.last)
        low, high = (self.knots.gather(2, at[..., None])[..., 0] for at in (above - 1, above))
        a, b = ((own - low) / (high - low)).unbind(1)
        i, j = above.unbind(1)
        each = torch.arange(len(i), device=i.device)
        below = (1 - b) * self.ms[each, i - 1, j - 1] + b * self.ms[each, i - 1, j]
        return (1 - a) * below + a * ((1 - b) * self.ms[each, i, j - 1] + b * self.ms[each, i, j])

    def to(self, device: torch.device) -> "Surface":
        """The same on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """Milliseconds of one forward, given which gates are open; ``gated.measure_latency`` makes it.

    Every operator of the forward was timed over a grid of widths, by itself, in evaluation mode;
    their sum is scaled: with all gates open it lies between itself and what the forward took.
    Kernels work in blocks of channels, so latency falls in steps: ``delivered`` knows them;
    ``expected`` goes straight from the end of one block to the next, never down, to have a
    gradient.

    Args:
        ledger: gives the sizes of all axes.
        fine: times with the steps.
        smooth: times without.
        selects: for operators that only run where a layer reads less than arrives.
        overhead: milliseconds that the calls of modules take besides.
        scale: the factor on the sum.
        batch: the number of examples.
        device: what it was measured on, in words.
        untimed: operators that did not run on invented numbers; their times are missing.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(1, 64))
        >>> table = gated.measure_latency(batch=512, repeats=15)
        >>> loss = gated.expected("latency_ms")             # differentiable
        >>> dense = gated.delivered("latency_ms")
        >>> _ = torch.nn.init.constant_(gated.gates.log_alpha, -5.0)
        >>> (gated.delivered("latency_ms") < dense).item()
        True
    """

    ledger: Ledger
    fine: Surface
    smooth: Surface
    selects: Tensor
    overhead: float
    scale: float
    batch: int
    device: str
    untimed: tuple[str, ...] = ()

    def expected(self, probability: Tensor) -> Tensor:
        """Milliseconds at the expected widths, for gates that are open with these."""
        return self._total(self.smooth, self.ledger.sizes(probability))

    def delivered(self, is_open: Tensor) -> Tensor:
        """Milliseconds of what compaction leaves when these gates are open."""
        return self._total(self.fine, self.ledger.sizes(is_open))

    @property
    def dense(self) -> float:
        """Milliseconds with all gates open."""
        return self._total(self.fine, self.ledger.dense_sizes).item()

    def _total(self, surface: Surface, sizes: Tensor) -> Tensor:
        ms = surface(sizes)
        arriving, read = torch.cat([sizes, sizes.new_ones(1)])[surface.rows].unbind(1)
        idle = self.selects & (read >= arriving)
        return self.scale * (torch.where(idle, 0.0, ms).sum() + self.overhead)

    def to(self, device: torch.device) -> "LatencyTable":
        """The numbers on another device; they are about the old one."""
        moved = {
            name: getattr(self, name).to(device) for name in ("ledger", "fine", "smooth", "selects")
        }
        return replace(self, **moved)

    def __str__(self) -> str:
        words = f"{len(self.selects)} operators at batch {self.batch} on {self.device}"
        lacks = f"; without {', '.join(self.untimed)}" if self.untimed else ""
        return f"{words}: {self.dense:.3g} ms with all gates open{lacks}"


def measure_latency(
    model: nn.Module,
    example: Inputs,
    gates: Mapping[Place, Tensor],
    *,
    analysis: Analysis | None = None,
    batch: int | None = None,
    repeats: int | None = None,
    fresh: bool = False,
) -> LatencyTable:
    """Time every operator of a model over a grid of widths, as far as that was not done before.

    Args:
        model: without gates; it is traced, not changed.
        example: positional and keyword inputs.
        gates: for the axes that are gated, the number of the gate of every index, or -1.
        analysis: of this model with these inputs, if it is known.
        batch: the number of examples, as many as in the example unless given.
        repeats: timed calls of each operator at each point of its grid; without it three passes of
            five calls and three seconds at least, of which the least counts.
        fresh: measure again what is in the cache.
    """
    size = batch_size(example)
    batch = size if batch is None else batch
    if batch < 1 or (repeats is not None and repeats < 2):
        raise ArgumentError(f"batch={batch} must be at least 1 and repeats={repeats} at least 2")
    known = analysis if batch == size > 1 else None
    writer = LedgerWriter(model, resampled(example, size, max(batch, 2)), gates, known)
    timed = operations(writer, model, example, batch)
    device = next(iter(model.parameters())).device
    forward = _forward(copy.deepcopy(model).eval(), resampled(example, size, batch))
    grids = _grids(timed, forward, device, repeats, fresh)
    ledger = writer.ledger()
    calls = {key for node in writer.walk.values for key in node.meta.get("nn_module_stack") or {}}
    parts = [part for one in timed for part in _parted(one, grids[one.name])]
    table = LatencyTable(
        ledger=ledger,
        fine=_surface(parts, smooth=False),
        smooth=_surface(parts, smooth=True),
        selects=torch.tensor([selects for _, _, selects in parts]),
        overhead=len(calls) * grids[MODULE_CALL].ms[0],
        scale=1.0,
        batch=batch,
        device=machine(device),
        untimed=tuple(dict.fromkeys(str(one.target) for one in timed if not grids[one.name].ms)),
    )
    return replace(table, scale=(grids[FORWARD].ms[0] / table.dense) ** BELIEF)


def _forward(model: nn.Module, given: Inputs) -> Call:
    """A call with other numbers: of a few examples repeated, processors guess the maxima."""
    random = torch.Generator().manual_seed(0)

    def varied(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        spread = tensor.std(correction=0).nan_to_num()
        noise = torch.randn(tensor.shape, generator=random).to(tensor)
        return tensor.mean() + noise * torch.where(spread > 0, spread, 1.0)

    args, kwargs = tree_map_only(Tensor, varied, given)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):  # not any number will do
        args, kwargs = given
    return partial(model, *args, **kwargs)


def _grids(
    found: Sequence[Operation],
    forward: Call,
    device: torch.device,
    repeats: int | None,
    fresh: bool,
) -> dict[str, Grid]:
    """From the cache, where such a forward was timed before; else from the clock."""
    words = "\n".join([ESTIMATOR, str(repeats), *(one.name for one in found)])
    name = hashlib.sha256(words.encode()).hexdigest()
    file = cache_file(device)
    known = kept(file)
    if fresh or name not in known:
        known[name] = timed(found, forward, device, repeats)
        keep(file, kept(file) | {name: known[name]})
    return known[name]


Part = tuple[tuple[int, ...], Grid, bool]
"""Rows, times at them, and whether it is about a selection."""


def _parted(one: Operation, grid: Grid) -> list[Part]:
    """An operator with more than two widths counts in parts, each linear in one of them."""
    rows = tuple(width.row for width in one.widths)
    if not grid.ms:
        return []
    if grid.knots or len(rows) <= 2:
        return [(rows if grid.knots else (), grid, one.selects)]
    whole = sum(width.dense for width in one.widths)
    parts: list[Part] = []
    for width in one.widths:
        ms = grid.ms[0] / whole
        parts.append(((width.row,), Grid(((1, width.dense),), (ms, ms * width.dense)), False))
    return parts


def _surface(parts: Sequence[Part], *, smooth: bool) -> Surface:
    tables = [_table(grid, smooth) for _, grid, _ in parts]
    size = max((len(line) for lines, _ in tables for line in lines), default=2)
    knots = torch.empty(len(parts), 2, size, dtype=torch.float64)
    ms = torch.zeros(len(parts), size, size, dtype=torch.float64)
    for k, (lines, values) in enumerate(tables):
        for side, line in enumerate(lines):
            more = range(line[-1] + 1, line[-1] + 1 + size - len(line))  # never looked at
            knots[k, side] = torch.tensor([*line, *more], dtype=torch.float64)
        ms[k, : len(lines[0]), : len(lines[1])] = values
    last = [[len(line) - 1 for line in lines] for lines, _ in tables]
    rows = [(*rows, -1, -1)[:2] for rows, _, _ in parts]
    return Surface(torch.tensor(rows), knots, torch.tensor(last), ms)


def _table(grid: Grid, smooth: bool) -> tuple[list[Any], Tensor]:
    """Two lines of knots and the times at their pairs; constant along a width that is missing."""
    times = dict(zip(product(*grid.knots), grid.ms, strict=True))
    lines = [[n for n in line if not smooth or n in edges(line[-1])] for line in grid.knots]
    values = torch.tensor([times[at] for at in product(*lines)], dtype=torch.float64)
    values = values.reshape([*map(len, lines), 1, 1][:2])
    if smooth:  # a wider layer that is faster would push gates open
        values = values.cummax(0).values.cummax(1).values
    full = [*lines, [1, 2], [1, 2]][:2]
    return full, values.expand(*map(len, full))
