"""Ridge regression on sums over rows: the weights whose products come nearest to targets."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_CHUNK_ENTRIES = 2**24
"""Entries of the rows that are in memory at a time."""

LEAST_HOLD = 1e-30
"""Mean square of inputs that are all zero: they hold their weights, and do not divide by zero."""


@dataclass(frozen=True)
class Solution:
    """What a regression gives.

    Args:
        matrix: the new weights, [group, out, in].
        shift: what has to be added to their results, [group, out]; zeros if nothing may be.
        missing: the part of the targets' variance that is not explained.
    """

    matrix: Tensor
    shift: Tensor
    missing: float

    @property
    def is_finite(self) -> bool:
        """Whether all is numbers."""
        return bool(self.matrix.isfinite().all() and self.shift.isfinite().all())


class Sums:
    """Sums over rows, by group: of X, Y, X^T X, X^T Y and Y^2, in float64.

    Products of a chunk of rows are taken in the chunk's precision. With an intercept, rows are
    counted from the first chunk's mean, so that a large mean costs no digits.

    Args:
        intercept: whether a constant may be added to the results.

    Example:
        >>> sums, x = Sums(intercept=True), torch.randn(64, 1, 3)
        >>> sums.add(x, x.sum(2, keepdim=True) + 5)
        >>> solution = sums.solve(torch.zeros(1, 1, 3), torch.ones(1, 1, 3).bool(), ridge=1e-9)
        >>> (solution.matrix - 1).abs().max() < 1e-5, solution.shift.round().tolist()
        (tensor(True), [[5.0]])
    """

    def __init__(self, *, intercept: bool) -> None:
        self.intercept = intercept
        self.rows = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add a chunk: x [row, group, in] and y [row, group, out]."""
        x, y = x.movedim(1, 0), y.movedim(1, 0)
        if not self.rows:
            self._start(x, y)
        x, y = x - self.x_origin, y - self.y_origin
        sums = x.sum(1), y.sum(1), x.mT @ x, x.mT @ y, y.square().sum(1)
        for total, chunk in zip(self.sums, sums, strict=True):
            total += chunk.to(total)  # to the accumulator's device and dtype
        self.rows += x.shape[1]

    def _start(self, x: Tensor, y: Tensor) -> None:
        self.x_origin = x.mean(1, keepdim=True) * self.intercept
        self.y_origin = y.mean(1, keepdim=True) * self.intercept
        device = torch.device("cpu") if x.device.type == "mps" else x.device  # without float64
        groups, _, inputs = x.shape
        outputs = y.shape[2]
        shapes = (inputs,), (outputs,), (inputs, inputs), (inputs, outputs), (outputs,)
        self.sums = [
            torch.zeros(groups, *shape, dtype=torch.float64, device=device) for shape in shapes
        ]

    def solve(self, before: Tensor, may_change: Tensor, ridge: float) -> Solution:
        """The weights that are nearest to the targets, held where they were; uses up the sums.

        Args:
            before: the weights until now, [group, out, in].
            may_change: of the same shape; elsewhere weights are zero and stay so.
            ridge: how strongly they are held, as a part of the mean square of the inputs.
        """
        x, y, xx, xy, yy = (total.div_(self.rows) for total in self.sums)
        if self.intercept:
            xx.baddbmm_(x[:, :, None], x[:, None], alpha=-1)
            xy.baddbmm_(x[:, :, None], y[:, None], alpha=-1)
            yy -= y.square()
        new, explained = _solve(xx, xy, before.mT.to(xx.device), may_change.to(xx.device), ridge)
        shift = torch.zeros_like(y)
        if self.intercept:
            x, y = x + self.x_origin[:, 0].to(x), y + self.y_origin[:, 0].to(y)
            shift = y - (x[:, None] @ new)[:, 0]
        variance = yy.sum().clamp(min=LEAST_HOLD)
        missing = ((yy.sum() - explained) / variance).clamp(min=0)
        return Solution(new.mT.to(before.device), shift.to(before.device), float(missing))


def _solve(
    xx: Tensor, xy: Tensor, before: Tensor, may_change: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    """W = (A + r I)^-1 (X^T Y + r W_0), once for each set of inputs that some output reads.

    Returns:
        W, and the sum over outputs of 2 W^T X^T Y - W^T A W, which it explains of Y^2: as A W is
        X^T Y + r (W_0 - W), it is W^T (X^T Y - r (W_0 - W)).
    """
    new, explained = torch.zeros_like(xy), xy.new_zeros(())
    for group, reads, inputs in _supports(may_change):
        place = group[:, None], inputs
        a, right, old = xx[group[:, None, None], inputs[:, None], inputs], xy[place], before[place]
        old = old.to(a)
        hold = ridge * a.diagonal(dim1=1, dim2=2).mean(1).clamp(min=LEAST_HOLD)[:, None, None]
        a.diagonal(dim1=1, dim2=2).add_(hold[:, 0])
        factor, failed = torch.linalg.cholesky_ex(a)
        del a
        solved = torch.cholesky_solve(right + hold * old, factor)
        solved[failed > 0] = torch.nan
        gain = solved * (right - hold * (old - solved))
        explained += gain.masked_fill(~reads[:, None], 0).sum()
        new[place] += solved.masked_fill_(~reads[:, None], 0)
    return new, explained


def _supports(may_change: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Groups, their outputs, and the inputs that those outputs read: one at a time."""
    rows = may_change.flatten(0, 1)
    every = rows.any(0)  # mostly all outputs that read anything read the same
    if (rows == every).all(1).logical_or(~rows.any(1)).all():
        sets, number = every[None], (~rows.any(1)).long()
    else:
        sets, number = torch.unique(rows, dim=0, return_inverse=True)
    number = number.view(len(may_change), -1)  # [group, out]
    for k, inputs in enumerate(sets):
        if inputs.any():
            groups = (number == k).any(1).nonzero().flatten()
            yield groups, number[groups] == k, inputs.nonzero().flatten()


def work(may_change: Tensor) -> float:
    """How many multiply-adds solving takes, about.

    Example:
        >>> work(torch.ones(2, 5, 30).bool())
        54000.0
    """
    return float(sum(len(group) * len(inputs) ** 3 for group, _, inputs in _supports(may_change)))


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products in float32, whatever was chosen for the model's, and without autocast."""
    torch_backends: Any = torch.backends
    backends = (torch_backends.cuda.matmul, torch_backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    devices = {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision
