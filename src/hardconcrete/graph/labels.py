"""Labels: which indices live or die as one, gathered while a graph is walked."""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Reason:
    """Why units are fixed: what was found, in which module, at which operator."""

    text: str
    module: str
    operator: str

    def __str__(self) -> str:
        return f"{self.text} ({self.operator} in {self.module or 'the model itself'})"


class Labels:
    """A union-find over integers, on whole arrays at once, that remembers why some are fixed.

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
        self._disturbed = torch.empty(0, dtype=torch.bool)
        self._size = 0
        self.reasons: list[Reason] = []

    def fresh(self, count: int) -> Tensor:
        """New labels, each alone."""
        start, self._size = self._size, self._size + count
        if self._size > len(self._parent):
            more = torch.arange(len(self._parent), 2 * self._size + 1024)
            self._parent = torch.cat([self._parent, more])
            self._reason = torch.cat([self._reason, torch.full_like(more, NEVER)])
            self._disturbed = torch.cat([self._disturbed, torch.zeros_like(more, dtype=torch.bool)])
        return torch.arange(start, self._size)

    def find(self, labels: Tensor) -> Tensor:
        """The smallest label that each of these is one with."""
        roots = self._parent[labels]
        while not torch.equal(above := self._parent[roots], roots):
            roots = above
        self._parent[labels] = roots
        return roots

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Make the labels at each place one; shapes broadcast."""
        a, b = torch.broadcast_tensors(self.find(first), self.find(second))
        while (differ := a != b).any():
            a, b = a[differ], b[differ]
            self._parent.scatter_reduce_(0, torch.maximum(a, b), torch.minimum(a, b), "amin")
            a, b = self.find(a), self.find(b)

    def fix(self, labels: Tensor, reason: Reason) -> None:
        """These may never be removed, and this is why; the first reason is kept."""
        self.reasons.append(reason)
        known = self._reason[labels]
        self._reason[labels] = known.clamp_max(len(self.reasons) - 1)

    def disturb(self, labels: Tensor) -> None:
        """Something maps the zeros of these to other values: zero outputs are not nothing."""
        self._disturbed[labels] = True

    def why_fixed(self) -> dict[int, Reason]:
        """The first reason of each root that is fixed."""
        roots = self.find(torch.arange(self._size))
        first = torch.full((self._size,), NEVER).scatter_reduce_(
            0, roots, self._reason[: self._size], "amin"
        )
        return {
            root: self.reasons[reason]
            for root, reason in enumerate(first.tolist())
            if reason != NEVER
        }

    def disturbed(self) -> set[int]:
        """The roots whose zeros do not stay zero."""
        marked = self._disturbed[: self._size].nonzero().flatten()
        return set(self.find(marked).tolist())
