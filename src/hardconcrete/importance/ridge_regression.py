"""Ridge regression from sums over rows: the weights whose products are nearest to targets."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_MEAN_SQUARE = 1e-30
"""Stands for the mean square of inputs that are all zero: the ridge then keeps their weights."""


@dataclass(frozen=True)
class Solution:
    """The solution of a regression.

    Args:
        matrix: the new weights, [group, out, in].
        shift: the intercept, [group, out]; zeros without one.
        unexplained: the fraction of the targets' variance that is not explained.
    """

    matrix: Tensor
    shift: Tensor
    unexplained: float

    @property
    def is_finite(self) -> bool:
        """Whether no weight and no intercept is infinite or NaN."""
        return bool(self.matrix.isfinite().all() and self.shift.isfinite().all())


class RidgeRegression:
    """A ridge regression that is fed in chunks of rows.

    It keeps, for each group, the sums of X, Y, X^T X, X^T Y and Y^2 in float64. The products of a
    chunk are taken in the chunk's precision. With an intercept, the first chunk's mean is
    subtracted from all rows, so that a large mean costs no digits.

    Args:
        intercept: whether a constant is added to the products.

    Example:
        >>> regression, x = RidgeRegression(intercept=True), torch.randn(64, 1, 3)
        >>> regression.add(x, x.sum(2, keepdim=True) + 5)
        >>> may_change = torch.ones(1, 1, 3).bool()
        >>> solution = regression.solve(torch.zeros(1, 1, 3), may_change, ridge=1e-9)
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
            total += chunk.to(total)  # the device and dtype of the totals
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
        """Solve for the weights. The sums are overwritten.

        Args:
            before: the weights to stay close to, [group, out, in].
            may_change: a mask of the same shape. Other weights are zero and stay zero.
            ridge: how strongly they stay close, as a fraction of the mean square of the inputs.
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
        variance = yy.sum().clamp(min=MIN_MEAN_SQUARE)
        unexplained = ((yy.sum() - explained) / variance).clamp(min=0)
        return Solution(new.mT.to(before.device), shift.to(before.device), float(unexplained))


def _solve(
    xx: Tensor, xy: Tensor, before: Tensor, may_change: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    """W = (A + r I)^-1 (X^T Y + r W_0), solved once for each set of inputs that outputs share.

    Returns:
        W, and the part of Y^2 that it explains: the sum over outputs of 2 W^T X^T Y - W^T A W. As
        A W = X^T Y + r (W_0 - W), this equals W^T (X^T Y - r (W_0 - W)).
    """
    new, explained = torch.zeros_like(xy), xy.new_zeros(())
    for group, uses, inputs in _input_sets(may_change):
        index = group[:, None], inputs
        a, right, old = xx[group[:, None, None], inputs[:, None], inputs], xy[index], before[index]
        old = old.to(a)
        r = ridge * a.diagonal(dim1=1, dim2=2).mean(1).clamp(min=MIN_MEAN_SQUARE)[:, None, None]
        a.diagonal(dim1=1, dim2=2).add_(r[:, 0])
        factor, failed = torch.linalg.cholesky_ex(a)
        del a
        solved = torch.cholesky_solve(right + r * old, factor)
        solved[failed > 0] = torch.nan
        gain = solved * (right - r * (old - solved))
        explained += gain.masked_fill(~uses[:, None], 0).sum()
        new[index] += solved.masked_fill_(~uses[:, None], 0)
    return new, explained


def _input_sets(may_change: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each set of inputs: the groups, a mask of their outputs that use it, and the inputs."""
    rows = may_change.flatten(0, 1)
    every = rows.any(0)  # usually all outputs that use any inputs use the same ones
    if (rows == every).all(1).logical_or(~rows.any(1)).all():
        sets, number = every[None], (~rows.any(1)).long()
    else:
        sets, number = torch.unique(rows, dim=0, return_inverse=True)
    number = number.view(len(may_change), -1)  # [group, out]
    for k, inputs in enumerate(sets):
        if inputs.any():
            groups = (number == k).any(1).nonzero().flatten()
            yield groups, number[groups] == k, inputs.nonzero().flatten()


def solve_cost(may_change: Tensor) -> float:
    """The approximate number of multiply-adds that solving takes.

    Example:
        >>> solve_cost(torch.ones(2, 5, 30).bool())
        54000.0
    """
    return float(sum(len(group) * len(inputs) ** 3 for group, _, inputs in _input_sets(may_change)))


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products in full float32, without TF32 or autocast, whatever the settings."""
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
