"""Rows of indices of different lengths, as tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of indices as one table, as wide as a power of two, -1 where a row is short.

    Example:
        >>> padded([[4], [1, 2, 3]]).tolist()
        [[4, -1, -1, -1], [1, 2, 3, -1]]
    """
    width = max((len(row) for row in rows), default=1)
    table = torch.full((len(rows), 1 << max(width - 1, 0).bit_length()), -1)
    for k, row in enumerate(rows):
        table[k, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return table


def joined(tables: Sequence[Tensor]) -> Tensor:
    """Tables one below the other, -1 where one is narrower than others.

    Example:
        >>> joined([torch.tensor([[4]]), torch.tensor([[1, 2]])]).tolist()
        [[4, -1], [1, 2]]
    """
    width = max((table.shape[1] for table in tables), default=1)
    wide = [torch.cat([t, torch.full((len(t), width - t.shape[1]), -1)], 1) for t in tables]
    return torch.cat(wide) if wide else torch.full((0, width), -1)


def filled(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows as one table; a short one says its first index again.

    Example:
        >>> filled([[4], [1, 2]]).tolist()
        [[4, 4], [1, 2]]
    """
    width = max(map(len, rows), default=1)
    table = [[*row, *[row[0]] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.int64).view(len(rows), width)
