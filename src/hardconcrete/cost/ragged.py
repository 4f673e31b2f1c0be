"""Tensors from rows of indices of different lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Make one table of rows, padded with -1 to a power of two.

    Example:
        >>> pad_rows([[4], [1, 2, 3]]).tolist()
        [[4, -1, -1, -1], [1, 2, 3, -1]]
    """
    width = max((len(row) for row in rows), default=1)
    table = torch.full((len(rows), 1 << max(width - 1, 0).bit_length()), -1)
    for k, row in enumerate(rows):
        table[k, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return table


def concatenate_tables(tables: Sequence[Tensor]) -> Tensor:
    """Concatenate tables along dimension 0, with the narrow ones padded with -1.

    Example:
        >>> concatenate_tables([torch.tensor([[4]]), torch.tensor([[1, 2]])]).tolist()
        [[4, -1], [1, 2]]
    """
    width = max((table.shape[1] for table in tables), default=1)
    wide = [torch.cat([t, torch.full((len(t), width - t.shape[1]), -1)], 1) for t in tables]
    return torch.cat(wide) if wide else torch.full((0, width), -1)


def repeat_to_width(rows: Sequence[Sequence[int]]) -> Tensor:
    """Make one table of rows, with the short ones padded with their first index.

    Example:
        >>> repeat_to_width([[4], [1, 2]]).tolist()
        [[4, 4], [1, 2]]
    """
    width = max(map(len, rows), default=1)
    table = [[*row, *[row[0]] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.int64).view(len(rows), width)
