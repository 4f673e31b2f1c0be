"""Re-fitting one layer of the small model to the output of the dense model there."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.importance.layer_calls import LayerCall
from hardconcrete.importance.lockstep import PausedLayer
from hardconcrete.importance.recording import RecordedLayer
from hardconcrete.importance.relevant_rows import RelevantRows
from hardconcrete.importance.ridge_regression import (
    RidgeRegression,
    Solution,
    exact_products,
    solve_cost,
)

MIN_ROWS = 32_768
"""A regression uses at least this many rows, if there are so many."""

MIN_ROWS_PER_INPUT = 8
"""It also uses at least this many rows for each input of the layer."""

MIN_ROWS_PER_BATCH = 2048
"""It also uses at least this many rows of each batch: more batches make a better fit."""

MAX_CHUNK_ENTRIES = 2**22
"""Entries of the rows that are in memory at a time."""

MAX_INPUTS = 16_384
"""Inputs of a layer that is re-fitted: their Gram matrix takes 2 GiB."""

MAX_SOLVE_COST = 1e13
"""Multiply-adds to solve for one weight: minutes on a CPU."""

RunningMeans = tuple[Tensor, Tensor]
"""The running means of the batch norm behind the layer, in the small and in the dense model."""


class CannotRefitError(Exception):
    """Says why a weight cannot be re-fitted."""


@torch.no_grad()
def fit_weight(
    layer: RecordedLayer,
    small: Sequence[PausedLayer],
    dense: Sequence[PausedLayer],
    means: RunningMeans | None,
    ridge: float,
    relevant: Sequence[RelevantRows] | None = None,
) -> float:
    """Solve for one weight, and for its bias or the mean of the batch norm behind it.

    Args:
        layer: the layer, and what directly follows it.
        small: the calls of the small model, one for each batch, paused before the layer.
        dense: the calls of the dense model, paused after it.
        means: of the batch norm behind the layer, if there is one.
        ridge: see ``refit``.
        relevant: for each call, the rows that count; None for all.

    Returns:
        The fraction of the targets' variance that is not explained.
    """
    before = small[0].call.matrix()
    may_change = before != 0
    columns = may_change.any(1).any(0) if len(before) == 1 else torch.ones_like(may_change[0, 0])
    may_change = may_change[:, :, columns]
    _refuse_size(may_change)
    regression = RidgeRegression(intercept=layer.has_bias or means is not None)
    with exact_products():
        for x, y in _chunks(layer, small, dense, columns, relevant):
            regression.add(x, y)
        solution = regression.solve(before[:, :, columns], may_change, ridge)
    matrix = torch.zeros_like(before)
    matrix[:, :, columns] = solution.matrix.to(before.dtype)
    _write(layer, small[0], matrix, solution, means)
    return solution.unexplained


def _refuse_size(may_change: Tensor) -> None:
    inputs = may_change.shape[2]
    if inputs > MAX_INPUTS:
        raise CannotRefitError(
            f"its {inputs:,} inputs need a Gram matrix of {8 * inputs**2 / 2**30:.0f} GiB"
        )
    if (cost := solve_cost(may_change)) > MAX_SOLVE_COST:
        raise CannotRefitError(f"its zeros lie scattered: solving takes {cost:.0e} multiply-adds")


def _write(
    layer: RecordedLayer,
    paused: PausedLayer,
    matrix: Tensor,
    solution: Solution,
    means: RunningMeans | None,
) -> None:
    """Write the solution to the weight, and to the bias or the norm's mean."""
    call, before = paused.call, paused.call.matrix()
    if not (solution.is_finite and matrix.isfinite().all()):
        raise CannotRefitError(f"its solution is not finite in {before.dtype}")
    fitted = _fitted_outputs(layer, paused, before)
    call.write(torch.where(fitted[:, :, None], matrix, before))
    fitted, shift = fitted.flatten(), solution.shift.flatten()
    if layer.has_bias and call.bias is not None:
        bias = call.bias.flatten()
        closed = (matrix == 0).all(2).flatten() & (bias == 0)
        bias = torch.where(fitted & ~closed, shift.to(bias), bias)
        call.bias.copy_(bias.view_as(call.bias))
    elif means is not None:  # norm(x + shift) equals the norm with its mean moved by -shift
        reference = means[0] if layer.feeds_addition else means[1].to(means[0])
        means[0].copy_(torch.where(fitted, reference - shift.to(means[0]), means[0]))


def _fitted_outputs(layer: RecordedLayer, paused: PausedLayer, matrix: Tensor) -> Tensor:
    """A mask of the outputs that have a target, [group, out].

    A channel that the norm before an addition scales to nearly zero has none.
    """
    if not layer.feeds_addition or paused.norm is None:
        return torch.ones(matrix.shape[:2], dtype=torch.bool, device=matrix.device)
    return paused.norm.is_invertible.view(matrix.shape[:2])


def _chunks(
    layer: RecordedLayer,
    small: Sequence[PausedLayer],
    dense: Sequence[PausedLayer],
    columns: Tensor,
    relevant: Sequence[RelevantRows] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of inputs and their targets, in float32 or better, as many as fit at a time."""
    matrix, inputs = small[0].call.matrix(), int(columns.sum())
    width = matrix.shape[0] * (inputs + matrix.shape[1])
    rows = max(MIN_ROWS, MIN_ROWS_PER_INPUT * inputs, MIN_ROWS_PER_BATCH * len(small))
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    for number, (paused, target) in enumerate(zip(small, dense, strict=True)):
        _refuse_difference(paused.call, target.call)
        mask = relevant[number].get(paused.call.positions) if relevant else None
        sample = _sample_rows(paused.call.row_count, -(-rows // len(small)), number, mask)
        for index in sample.split(max(1, MAX_CHUNK_ENTRIES // max(width, 1))):
            index = index.to(paused.call.inputs.device)
            x = paused.call.rows(index, columns).to(dtype)
            yield x, _targets(layer, paused, target, index, dtype).to(x.device)


def _targets(
    layer: RecordedLayer,
    paused: PausedLayer,
    target: PausedLayer,
    index: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The values that inputs times the weight should have, [row, group, out]."""
    call, output = paused.call, target.output
    if output is None:
        raise CompactionError(f"{layer.name}: the dense model's output was not recorded")
    y = call.output_rows(output, index.to(output.device)).to(index.device, dtype)
    if paused.shortcut is not None:
        y = y - call.output_rows(paused.shortcut.expand_as(output), index).to(dtype)
    if paused.shortcut is not None and paused.norm is not None:
        y = paused.norm.inverse(y.flatten(1), 1).view_as(y)
    if call.bias is not None and not layer.has_bias:
        y = y - call.bias.to(dtype).view(y.shape[1:])
    return y


def _refuse_difference(small: LayerCall, dense: LayerCall) -> None:
    if small.inputs.shape != dense.inputs.shape:
        raise CompactionError(
            f"{small.name}: its inputs are {list(small.inputs.shape)} in the small model and "
            f"{list(dense.inputs.shape)} in the dense one; the forward of the model depends on "
            "its inputs"
        )


def _sample_rows(rows: int, count: int, seed: int, mask: Tensor | None) -> Tensor:
    """Numbers of rows that count, the same in every run."""
    numbers = torch.arange(rows) if mask is None else mask.nonzero().flatten()
    if len(numbers) <= count:
        return numbers
    generator = torch.Generator().manual_seed(seed)
    return numbers[torch.randint(len(numbers), (count,), generator=generator)]
