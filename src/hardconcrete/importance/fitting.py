"""Fitting one weight of the small model to what the dense model computes there."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hardconcrete.errors import CompactionError
from hardconcrete.importance.contractions import Contraction
from hardconcrete.importance.recording import Step
from hardconcrete.importance.regression import Solution, Sums, exact_products, work
from hardconcrete.importance.walks import Stop

MIN_ROWS = 32_768
"""Rows that a regression gets at least, where there are so many."""

ROWS_PER_COLUMN = 8
"""Rows for each unknown of an output, above that."""

ROWS_PER_BATCH = 2048
"""Rows from each batch at least: more batches are given for a better fit."""

MAX_CHUNK_ENTRIES = 2**22
"""Entries of rows that are in memory at a time."""

MAX_COLUMNS = 16_384
"""Inputs of a weight that is re-fitted: their Gram matrix has 2 GiB."""

MAX_WORK = 1e13
"""Multiply-adds to solve for one weight: minutes on a CPU."""

Means = tuple[Tensor, Tensor]
"""The running means of the norm that follows, in the small and in the dense model."""


class UnfitError(Exception):
    """Why a weight cannot be re-fitted."""


@torch.no_grad()
def fit_weight(
    step: Step, calls: Sequence[Stop], targets: Sequence[Stop], means: Means | None, ridge: float
) -> float:
    """Solve for one weight, and for its bias or the mean of the norm that follows.

    Args:
        step: which weight it is, and what follows it.
        calls: of the small model, one for each batch.
        targets: of the dense model.
        means: of the norm that follows, if one does.
        ridge: see ``refit``.

    Returns:
        The part of the targets' variance that is not explained.
    """
    weight = calls[0].contraction
    before = weight.matrix()
    may_change = before != 0
    columns = may_change.any(1).any(0) if len(before) == 1 else torch.ones_like(may_change[0, 0])
    may_change = may_change[:, :, columns]
    _refuse_size(may_change)
    sums = Sums(intercept=step.has_bias or means is not None)
    with exact_products():
        for x, y in _chunks(step, calls, targets, columns):
            sums.add(x, y)
        solution = sums.solve(before[:, :, columns], may_change, ridge)
    matrix = torch.zeros_like(before)
    matrix[:, :, columns] = solution.matrix.to(before.dtype)
    _write(step, calls[0], matrix, solution, means)
    return solution.missing


def _refuse_size(may_change: Tensor) -> None:
    columns = may_change.shape[2]
    if columns > MAX_COLUMNS:
        raise UnfitError(
            f"its {columns:,} inputs need a Gram matrix of {8 * columns**2 / 2**30:.0f} GiB"
        )
    if (products := work(may_change)) > MAX_WORK:
        raise UnfitError(f"its zeros lie scattered: solving takes {products:.0e} multiply-adds")


def _write(step: Step, call: Stop, matrix: Tensor, solution: Solution, means: Means | None) -> None:
    """Put the solution in its place; channels that a norm all but erases stay as they are."""
    contraction, before = call.contraction, call.contraction.matrix()
    if not (solution.is_finite and matrix.isfinite().all()):
        raise UnfitError(f"its solution is not finite in {before.dtype}")
    fitted = _fitted_outputs(step, call, before)
    contraction.write(torch.where(fitted[:, :, None], matrix, before))
    fitted, shift = fitted.flatten(), solution.shift.flatten()
    if step.has_bias and contraction.bias is not None:
        bias = contraction.bias.flatten()
        shut = (matrix == 0).all(2).flatten() & (bias == 0)
        bias = torch.where(fitted & ~shut, shift.to(bias), bias)
        contraction.bias.copy_(bias.view_as(contraction.bias))
    elif means is not None:  # norm(x + shift) is the norm with its mean moved
        reference = means[0] if step.to_sum else means[1].to(means[0])
        means[0].copy_(torch.where(fitted, reference - shift.to(means[0]), means[0]))


def _fitted_outputs(step: Step, call: Stop, matrix: Tensor) -> Tensor:
    """Which outputs have a target, [group, out]."""
    if not step.to_sum or call.norm is None:
        return torch.ones(matrix.shape[:2], dtype=torch.bool, device=matrix.device)
    return call.norm.is_invertible.view(matrix.shape[:2])


def _chunks(
    step: Step, calls: Sequence[Stop], targets: Sequence[Stop], columns: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their targets, in float32 or better, as many as fit at a time."""
    matrix = calls[0].contraction.matrix()
    width = matrix.shape[0] * (int(columns.sum()) + matrix.shape[1])
    wanted = max(MIN_ROWS, ROWS_PER_COLUMN * int(columns.sum()), ROWS_PER_BATCH * len(calls))
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    for number, (call, target) in enumerate(zip(calls, targets, strict=True)):
        _refuse_difference(call.contraction, target.contraction)
        places = _sample(call.contraction.row_count, -(-wanted // len(calls)), number)
        for some in places.split(max(1, MAX_CHUNK_ENTRIES // max(width, 1))):
            some = some.to(call.contraction.inputs.device)
            x = call.contraction.rows(some, columns).to(dtype)
            yield x, _targets(step, call, target, some, dtype).to(x.device)


def _targets(step: Step, call: Stop, target: Stop, places: Tensor, dtype: torch.dtype) -> Tensor:
    """What the weight's products should be, [row, group, out]."""
    contraction, output = call.contraction, target.output
    if output is None:
        raise CompactionError(f"{step.name}: the dense model's output was not recorded")
    y = contraction.results(output, places.to(output.device)).to(places.device, dtype)
    if call.shortcut is not None:
        y = y - contraction.results(call.shortcut.expand_as(output), places).to(dtype)
    if call.shortcut is not None and call.norm is not None:
        y = call.norm.inverse(y.flatten(1), 1).view_as(y)
    if contraction.bias is not None and not step.has_bias:
        y = y - contraction.bias.to(dtype).view(y.shape[1:])
    return y


def _refuse_difference(call: Contraction, target: Contraction) -> None:
    if call.inputs.shape != target.inputs.shape:
        raise CompactionError(
            f"{call.name}: its inputs are {list(call.inputs.shape)} in the small model and "
            f"{list(target.inputs.shape)} in the dense one; the forward of the model depends on "
            "its inputs"
        )


def _sample(rows: int, wanted: int, number: int) -> Tensor:
    """Some rows, the same in every run."""
    if rows <= wanted:
        return torch.arange(rows)
    generator = torch.Generator().manual_seed(number)
    return torch.randint(rows, (wanted,), generator=generator)
