"""Labels: which indices can only be removed together."""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_REASON = torch.iinfo(torch.int64).max
"""In place of the number of a reason: the label is not fixed."""


@dataclass(frozen=True)
class Reason:
    """Why units cannot be removed.

    Args:
        text: the reason in words.
        module: where it arises.
        operator: the operator there.
        because: why the tensor that they are combined with cannot shrink, if that is the reason.
    """

    text: str
    module: str
    operator: str
    because: str = ""

    def __str__(self) -> str:
        text = f"{self.text}: {self.because}" if self.because else self.text
        return f"{text} ({self.operator} in {self.module or 'the model itself'})"

    @property
    def cause(self) -> str:
        """The reason at its origin, which many units may share."""
        return self.because or f"{self.text} ({self.operator})"


class Labels:
    """A union-find over integers, vectorized, that records why some are fixed.

    Each index along each dimension of a parameter starts with a label. Operators unite labels.
    The smallest label of a united set is its root.

    Example:
        >>> labels = Labels()
        >>> a, b = labels.fresh(3), labels.fresh(3)
        >>> labels.unite(a, b.flip(0))
        >>> labels.find(b).tolist()
        [2, 1, 0]
    """

    def __init__(self) -> None:
        self._parent = torch.empty(0, dtype=torch.int64)
        self._reason = torch.empty(0, dtype=torch.int64)
        self._zero_lost = torch.empty(0, dtype=torch.bool)
        self._size = 0
        self.reasons: list[Reason] = []

    @property
    def size(self) -> int:
        """How many labels there are."""
        return self._size

    def fresh(self, count: int) -> Tensor:
        """Make new labels, each in a set by itself."""
        start, self._size = self._size, self._size + count
        if self._size > len(self._parent):
            more = torch.arange(len(self._parent), 2 * self._size + 1024)
            self._parent = torch.cat([self._parent, more])
            self._reason = torch.cat([self._reason, torch.full_like(more, NO_REASON)])
            self._zero_lost = torch.cat([self._zero_lost, torch.zeros_like(more, dtype=torch.bool)])
        return torch.arange(start, self._size)

    def find(self, labels: Tensor) -> Tensor:
        """Return the root of each label."""
        roots = self._parent[labels]
        while not torch.equal(above := self._parent[roots], roots):
            roots = above
        self._parent[labels] = roots
        return roots

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Unite the labels at each position; shapes broadcast."""
        a, b = torch.broadcast_tensors(self.find(first), self.find(second))
        while (differ := a != b).any():
            a, b = a[differ], b[differ]
            self._parent.scatter_reduce_(0, torch.maximum(a, b), torch.minimum(a, b), "amin")
            a, b = self.find(a), self.find(b)

    def count_united(self, roots: Tensor) -> int:
        """How many labels are in the sets of these roots."""
        chosen = torch.zeros(self._size, dtype=torch.bool)
        chosen[roots] = True
        return int(chosen[self.find(torch.arange(self._size))].sum())

    def fix(self, labels: Tensor, reason: Reason) -> None:
        """Forbid the removal of these labels. A label keeps its first reason."""
        self.reasons.append(reason)
        known = self._reason[labels]
        self._reason[labels] = known.clamp_max(len(self.reasons) - 1)

    def reason_at(self, root: int) -> Reason | None:
        """The reason that was recorded at this label itself, without those united with it."""
        number = int(self._reason[root])
        return None if number == NO_REASON else self.reasons[number]

    def mark_zero_lost(self, labels: Tensor) -> None:
        """Record that an operator maps zeros of these units to other values.

        Such a unit still acts on its readers when all weights that make it are zero.
        """
        self._zero_lost[labels] = True

    def why_fixed(self) -> dict[int, Reason]:
        """The first reason of each fixed root."""
        roots = self.find(torch.arange(self._size))
        first = torch.full((self._size,), NO_REASON).scatter_reduce_(
            0, roots, self._reason[: self._size], "amin"
        )
        return {
            root: self.reasons[reason]
            for root, reason in enumerate(first.tolist())
            if reason != NO_REASON
        }

    def zero_lost(self) -> set[int]:
        """The roots of units whose zeros some operator maps to other values."""
        marked = self._zero_lost[: self._size].nonzero().flatten()
        return set(self.find(marked).tolist())
