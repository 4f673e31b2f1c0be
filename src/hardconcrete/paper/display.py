"""A line per network while it trains: a live bar in a terminal, and plain lines elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
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

    def fields(self, dense: float) -> dict[str, str]:
        """As columns, multiply-adds as parts of the dense ones."""
        return {
            "loss": f"{self.loss:.3f}",
            "units": "-".join(map(str, self.units)),
            "MACs": f"{self.delivered / dense:.0%}",
            "expected": f"{self.expected / dense:.0%}",
        }


FIELDS = ("epoch", "loss", "units", "MACs", "expected")
"""Columns beside the bar: of a status, after the epoch."""


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


class Bars(Progress):
    """A bar per network, and what stands beside it under headings: all of it in 80 columns."""

    def __init__(self, names: Sequence[str], console: Console, *, disable: bool) -> None:
        name = Column(min_width=max(map(len, names)))
        super().__init__(
            TextColumn("{task.description}", table_column=name),
            BarColumn(bar_width=20 if console.width >= 110 else 10),
            *map(_column, FIELDS),
            TimeRemainingColumn(compact=True, table_column=Column("left", no_wrap=True)),
            console=console,
            disable=disable,
        )

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """Rich's own, with its headings."""
        table = super().make_tasks_table(tasks)
        table.show_header = True
        return table


def _column(field: str) -> TextColumn:
    text = f"{{task.fields[{field}]}}"
    if field == "units":  # of many groups: they give way
        return TextColumn(text, table_column=Column(field, overflow="ellipsis"))
    heading = Column(field, justify="right", no_wrap=True)
    return TextColumn(text, justify="right", table_column=heading)


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
        self.bar = Bars(names, self.console, disable=not self.live)
        blank: dict[str, Any] = dict.fromkeys(FIELDS, "")
        self.sweep = None
        if sweep is not None:
            title = f"run {sweep.number} of {sweep.runs}: {sweep.title}"
            self.before = (sweep.number - 1) * epochs
            total = sweep.runs * epochs
            self.sweep = self.bar.add_task(title, total=total, completed=self.before, **blank)
            if not self.live:
                self.console.print(title, highlight=False, soft_wrap=True)
        self.tasks = [self.bar.add_task(name, total=epochs, **blank) for name in names]

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
            fields: Any = {"epoch": f"{epoch}/{self.epochs}", **now.fields(self.dense)}
            self.bar.update(task, completed=epoch, **fields)
            if not self.live and (
                epoch == self.epochs or epoch % max(1, self.epochs // LINES) == 0
            ):
                text = "{epoch} loss {loss} units {units} MACs {MACs} (expected {expected})"
                line = f"{name}  {text.format(**fields)}"
                self.console.print(line, highlight=False, soft_wrap=True)
