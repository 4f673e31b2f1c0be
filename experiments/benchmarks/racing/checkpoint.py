"""Checkpoints: a training writes what it needs from time to time, and continues from there."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]


class Paused(Exception):  # noqa: N818  (nothing is wrong)
    """The time is over. The same job continues from its checkpoint, if it has one."""


class Checkpoint:
    """Where a job keeps its state, how often, and when it has to stop.

    Args:
        file: of the state; without one the job starts again when it was stopped.
        every: seconds from one checkpoint to the next.
        deadline: when to stop, as ``time.time()`` counts.
    """

    def __init__(
        self, file: Path | None = None, every: float = math.inf, deadline: float = math.inf
    ) -> None:
        self.file, self.every, self.deadline = file, every, deadline
        self._start = self._saved = time.time()
        self._seconds_before = 0.0
        self.pieces = 1  # in which the job ran so far

    def without_file(self) -> "Checkpoint":
        """The same deadline for a training that cannot be continued."""
        return Checkpoint(deadline=self.deadline)

    def seconds(self) -> float:
        """How long the job ran, in all its pieces."""
        return self._seconds_before + time.time() - self._start

    def load(self, device: torch.device) -> State | None:
        """The state of the training that was stopped, if there is one."""
        if self.file is None or not self.file.exists():
            return None
        found: State = torch.load(self.file, map_location=device)
        self._seconds_before, self.pieces = found["seconds"], found["pieces"] + 1
        return found["training"]  # type: ignore[no-any-return]

    def save(self, state: State) -> None:
        """Write the state; a file that is there already stays until this one is complete."""
        self._saved = time.time()
        if self.file is None:
            return
        draft = self.file.with_suffix(".draft")
        contents = {"seconds": self.seconds(), "pieces": self.pieces, "training": state}
        torch.save(contents, draft)
        draft.replace(self.file)

    def over(self) -> bool:
        """Whether the time is over."""
        return time.time() >= self.deadline

    def after_step(self, state: Callable[[], State]) -> None:
        """Write the state if it is time to; raises ``Paused`` when the time is over."""
        over = self.over()
        if over or time.time() - self._saved >= self.every:
            self.save(state())
        if over:
            raise Paused
