"""A line per network while it trains: a live bar in a terminal, and plain lines elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import nn

import hardconcrete as hc

LINES = 10
"""Lines per network where there is no terminal to draw a bar in."""


@dataclass(frozen=True)
class Status:
    """Where a network stands after an epoch.

    Args:
        loss: mean over the epoch, penalty included.
        units: gates that the readout leaves open, by group.
        expected: multiply-adds expected under the probabilities of opening.
        delivered: multiply-adds of the network that the readout leaves.
    """

    loss: float
    units: tuple[int, ...]
    expected: float
    delivered: float


def status(model: nn.Module, loss: float, sizes: Mapping[str, int], dense: int) -> Status:
    """The status of a network, whose dense form has these units and multiply-adds.

    The gates of a gated one were attached with one example.
    """
    if not isinstance(model, hc.GatedModel):
        return Status(loss, tuple(sizes.values()), dense, dense)
    expected, delivered = model.expected("macs").item(), model.delivered("macs").item()
    return Status(loss, model.units_left(), expected, delivered)


@dataclass(frozen=True)
class Sweep:
    """Which of several runs this is: the title of the run, its number from 1, and how many."""

    title: str
    number: int
    runs: int


class Display:
    """Shows the status of several networks over the epochs.

    Example:
        >>> with Display(["dense"], epochs=2, dense=100.0) as display:
        ...     display.update(1, [Status(0.5, (4, 3), 80.0, 90.0)])
        dense  1/2 loss 0.500 units 4-3 MACs 90% (expected 80%)
    """

    def __init__(
        self,
        names: Sequence[str],
        epochs: int,
        dense: float,
        sweep: Sweep | None = None,
        *,
        silent: bool = False,
    ) -> None:
        self.names, self.epochs, self.dense = names, epochs, dense
        self.console = Console(quiet=True) if silent else Console()
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        name = Column(no_wrap=True, min_width=max(map(len, names)))
        text, left = TextColumn("{task.fields[text]}"), TimeRemainingColumn(compact=True)
        wide = [BarColumn(bar_width=20)] if self.console.width >= 110 else []
        columns = (TextColumn("{task.description}", table_column=name), *wide, text, left)
        self.bar = Progress(*columns, console=self.console, disable=not self.live)
        self.sweep = None
        if sweep is not None:
            title = f"run {sweep.number} of {sweep.runs}: {sweep.title}"
            self.before = (sweep.number - 1) * epochs
            total = sweep.runs * epochs
            self.sweep = self.bar.add_task(title, total=total, completed=self.before, text="")
            if not self.live:
                self.console.print(title, highlight=False, soft_wrap=True)
        self.tasks = [self.bar.add_task(name, total=epochs, text="") for name in names]

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def update(self, epoch: int, statuses: Sequence[Status]) -> None:
        """Show where every network stands."""
        if self.sweep is not None:
            self.bar.update(self.sweep, completed=self.before + epoch)
        for name, task, now in zip(self.names, self.tasks, statuses, strict=True):
            text = (
                f"{epoch}/{self.epochs} loss {now.loss:.3f} units "
                f"{'-'.join(map(str, now.units))} MACs {now.delivered / self.dense:.0%} "
                f"(expected {now.expected / self.dense:.0%})"
            )
            self.bar.update(task, completed=epoch, text=text)
            if not self.live and (
                epoch == self.epochs or epoch % max(1, self.epochs // LINES) == 0
            ):
                self.console.print(f"{name}  {text}", highlight=False, soft_wrap=True)
