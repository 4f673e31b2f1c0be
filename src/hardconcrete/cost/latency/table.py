"""Latency as a function of gates: times of single operators, interpolated between widths."""

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

from hardconcrete.arguments import refuse_no_count
from hardconcrete.cost.example_inputs import batch_size, resampled
from hardconcrete.cost.latency.clock import (
    FORWARD,
    MODULE_CALL,
    Grid,
    block_edges,
    cache_file,
    machine_name,
    read_cache,
    time_grids,
    write_cache,
)
from hardconcrete.cost.latency.operations import Operation, operations
from hardconcrete.cost.latency.timing import Call
from hardconcrete.cost.ledger import Ledger
from hardconcrete.cost.ledger_writer import LedgerWriter
from hardconcrete.graph.example_inputs import ExampleInputs
from hardconcrete.units import Analysis
from hardconcrete.units.axis import Place

FORWARD_EXPONENT = 0.75
"""The exponent of (time of the forward / sum of the operators) in the scale of the table.

With 1 the dense prediction is the time of the forward, with 0 the sum. Both are estimates for
another network of these operators, with different errors."""

ESTIMATOR_VERSION = "4"
"""The version of the way to measure. Cached times of another version are not used."""


@dataclass(frozen=True, eq=False)
class Surface:
    """Piecewise bilinear functions of two sizes, one for each operator.

    Args:
        rows: the two axes of the ledger that give the sizes; -1 if there is none.
        knots: sizes at which the functions are known.
        last: the index of the last knot of each size.
        ms: milliseconds at pairs of knots.
    """

    rows: Tensor
    knots: Tensor
    last: Tensor
    ms: Tensor

    def __call__(self, sizes: Tensor) -> Tensor:
        """Milliseconds of each operator, for the sizes of all axes."""
        points = torch.cat([sizes, sizes.new_ones(1)])[self.rows]
        above = torch.searchsorted(self.knots, points.detach()[..., None].contiguous())[..., 0]
        above = torch.minimum(above.clamp(min=1), self.last)
        low, high = (self.knots.gather(2, at[..., None])[..., 0] for at in (above - 1, above))
        a, b = ((points - low) / (high - low)).unbind(1)
        i, j = above.unbind(1)
        each = torch.arange(len(i), device=i.device)
        below = (1 - b) * self.ms[each, i - 1, j - 1] + b * self.ms[each, i - 1, j]
        return (1 - a) * below + a * ((1 - b) * self.ms[each, i, j - 1] + b * self.ms[each, i, j])

    def to(self, device: torch.device) -> "Surface":
        """The same functions on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """Milliseconds of one forward as a function of gates. ``gated.measure_latency`` makes it.

    Each operator of the forward was timed over a grid of widths, in evaluation mode. The prediction
    is their sum, scaled so that with all gates open it lies between the sum and the time of the
    forward. Kernels process blocks of channels, so latency falls in steps. ``delivered`` has these
    steps. ``expected`` is linear between the ends of blocks and never falls as a layer gets wider,
    so that its gradient is useful.

    Args:
        ledger: gives the sizes of all axes.
        fine: times with the steps.
        smooth: times without the steps.
        selects: which operators select inputs; they run only if a layer reads less than arrives.
        overhead: milliseconds of the module calls.
        scale: the factor on the sum.
        batch: the batch size.
        device: the device, and what else times depend on.
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
        """Milliseconds at the expected widths, for these probabilities of open gates."""
        return self._total(self.smooth, self.ledger.sizes(probability))

    def delivered(self, is_open: Tensor) -> Tensor:
        """Milliseconds after compaction, if these gates are open."""
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
        """Move the table to another device. Its times remain those of the old device."""
        moved = {
            name: getattr(self, name).to(device) for name in ("ledger", "fine", "smooth", "selects")
        }
        return replace(self, **moved)

    def __str__(self) -> str:
        text = f"{len(self.selects)} operators at batch {self.batch} on {self.device}"
        missing = f"; without {', '.join(self.untimed)}" if self.untimed else ""
        return f"{text}: {self.dense:.3g} ms with all gates open{missing}"


def time_operations(
    model: nn.Module,
    example: ExampleInputs,
    gates: Mapping[Place, Tensor],
    *,
    analysis: Analysis | None = None,
    batch: int | None = None,
    repeats: int | None = None,
    fresh: bool = False,
) -> LatencyTable:
    """Time each operator of a model over a grid of widths, or read its times from the cache.

    Args:
        model: the model without gates; it is not changed.
        example: positional and keyword inputs.
        gates: for each gated axis the number of the gate of each index, or -1.
        analysis: the analysis of the model for this example, if you have it.
        batch: the batch size; by default that of the example.
        repeats: timed calls of each operator at each grid point. By default three passes of at
            least five calls and three seconds, of which the fastest counts.
        fresh: measure again even if the cache has the times.
    """
    size = batch_size(example)
    batch = size if batch is None else batch
    _check_numbers(batch, repeats)
    same_batch = analysis if batch == size > 1 else None
    writer = LedgerWriter(model, resampled(example, size, max(batch, 2)), gates, same_batch)
    timed = operations(writer, model, example, batch)
    device = next(iter(model.parameters())).device
    forward = _forward_call(copy.deepcopy(model).eval(), resampled(example, size, batch))
    grids = _grids(timed, forward, device, repeats, fresh)
    parts = [part for operation in timed for part in _timed_parts(operation, grids[operation.name])]
    table = LatencyTable(
        ledger=writer.ledger(),
        fine=_surface(parts, smooth=False),
        smooth=_surface(parts, smooth=True),
        selects=torch.tensor([selects for _, _, selects in parts]),
        overhead=_module_calls(writer) * grids[MODULE_CALL].ms[0],
        scale=1.0,
        batch=batch,
        device=machine_name(device),
        untimed=_untimed(timed, grids),
    )
    return replace(table, scale=(grids[FORWARD].ms[0] / table.dense) ** FORWARD_EXPONENT)


def _check_numbers(batch: int, repeats: int | None) -> None:
    refuse_no_count(batch=batch)
    refuse_no_count(2, repeats=2 if repeats is None else repeats)


def _module_calls(writer: LedgerWriter) -> int:
    """How many modules a forward calls."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in writer.labelled.values)
    return len({key for stack in stacks for key in stack})


def _untimed(timed: Sequence[Operation], grids: Mapping[str, Grid]) -> tuple[str, ...]:
    """Operators without times."""
    return tuple(dict.fromkeys(str(each.target) for each in timed if not grids[each.name].ms))


def _forward_call(model: nn.Module, inputs: ExampleInputs) -> Call:
    """A call of the model with random inputs.

    With repeated examples, branch prediction would make operators such as max pooling faster.
    """
    generator = torch.Generator().manual_seed(0)

    def varied(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        spread = tensor.std(correction=0).nan_to_num()
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor.mean() + noise * torch.where(spread > 0, spread, 1.0)

    args, kwargs = tree_map_only(Tensor, varied, inputs)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):  # the model does not accept all numbers
        args, kwargs = inputs
    return partial(model, *args, **kwargs)


def _grids(
    timed: Sequence[Operation],
    forward: Call,
    device: torch.device,
    repeats: int | None,
    fresh: bool,
) -> dict[str, Grid]:
    """Read the grids from the cache if this forward was timed before; else time them."""
    key = "\n".join([ESTIMATOR_VERSION, str(repeats), *(operation.name for operation in timed)])
    name = hashlib.sha256(key.encode()).hexdigest()
    file = cache_file(device)
    known = read_cache(file)
    if fresh or name not in known:
        known[name] = time_grids(timed, forward, device, repeats)
        write_cache(file, read_cache(file) | {name: known[name]})
    return known[name]


TimedPart = tuple[tuple[int, ...], Grid, bool]
"""Axes of the ledger, times by their sizes, and whether the operator is a selection."""


def _timed_parts(operation: Operation, grid: Grid) -> list[TimedPart]:
    """The parts that an operator counts in: one, or one per width if it has more than two.

    Each of these several parts is linear in its width.
    """
    rows = tuple(width.row for width in operation.widths)
    if not grid.ms:
        return []
    if grid.knots or len(rows) <= 2:
        return [(rows if grid.knots else (), grid, operation.selects)]
    total = sum(width.dense for width in operation.widths)
    parts: list[TimedPart] = []
    for width in operation.widths:
        ms = grid.ms[0] / total
        parts.append(((width.row,), Grid(((1, width.dense),), (ms, ms * width.dense)), False))
    return parts


def _surface(parts: Sequence[TimedPart], *, smooth: bool) -> Surface:
    tables = [_knot_table(grid, smooth) for _, grid, _ in parts]
    size = max((len(line) for lines, _ in tables for line in lines), default=2)
    knots = torch.empty(len(parts), 2, size, dtype=torch.float64)
    ms = torch.zeros(len(parts), size, size, dtype=torch.float64)
    for k, (lines, values) in enumerate(tables):
        for side, line in enumerate(lines):
            more = range(line[-1] + 1, line[-1] + 1 + size - len(line))  # padding, never read
            knots[k, side] = torch.tensor([*line, *more], dtype=torch.float64)
        ms[k, : len(lines[0]), : len(lines[1])] = values
    last = [[len(line) - 1 for line in lines] for lines, _ in tables]
    rows = [(*rows, -1, -1)[:2] for rows, _, _ in parts]
    return Surface(torch.tensor(rows), knots, torch.tensor(last), ms)


def _knot_table(grid: Grid, smooth: bool) -> tuple[list[Any], Tensor]:
    """The knots of two widths and the times at their pairs; constant along a missing width."""
    times = dict(zip(product(*grid.knots), grid.ms, strict=True))
    lines = [[n for n in line if not smooth or n in block_edges(line[-1])] for line in grid.knots]
    values = torch.tensor([times[at] for at in product(*lines)], dtype=torch.float64)
    values = values.reshape([*map(len, lines), 1, 1][:2])
    if smooth:  # a wider layer that is faster would push gates open
        values = values.cummax(0).values.cummax(1).values
    full = [*lines, [1, 2], [1, 2]][:2]
    return full, values.expand(*map(len, full))
