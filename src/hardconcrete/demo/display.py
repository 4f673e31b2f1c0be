"""A line per network while it trains: a live bar in a terminal, and plain lines elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from torch import nn

import hardconcrete as hc

LINES = 10
"""Lines per network where there is no terminal to draw a bar in."""

FIELDS = ("epoch", "loss", "units", "MACs", "expected")
"""Columns next to the bar: the epoch, then the status."""


@dataclass(frozen=True)
class Status:
    """A network after an epoch.

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
        """The columns, with multiply-adds as fractions of the dense ones."""
        return {
            "loss": f"{self.loss:.3f}",
            "units": "-".join(map(str, self.units)),
            "MACs": f"{self.delivered / dense:.0%}",
            "expected": f"{self.expected / dense:.0%}",
        }


def status(model: nn.Module, loss: float, sizes: Mapping[str, int], dense: int) -> Status:
    """The status of a network, whose dense form has these units and multiply-adds.

    The gates of a gated one were attached with one example.
    """
    if not isinstance(model, hc.GatedModel):
        return Status(loss, tuple(sizes.values()), dense, dense)
    expected, delivered = model.expected("macs").item(), model.delivered("macs").item()
    return Status(loss, model.units_left(), expected, delivered)


class Display(Progress):
    """Shows the status of several networks over the epochs, in 80 columns.

    Args:
        names: of the networks.
        epochs: of the training.
        dense: multiply-adds of the dense network.
        silent: whether nothing is shown.

    Example:
        >>> with Display(["dense"], epochs=2, dense=100.0) as display:
        ...     display.show(1, [Status(0.5, (4, 3), 80.0, 90.0)])
        dense  1/2 loss 0.500 units 4-3 MACs 90% (expected 80%)
    """

    def __init__(
        self, names: Sequence[str], epochs: int, dense: float, *, silent: bool = False
    ) -> None:
        console = Console(quiet=True) if silent else Console()
        self.in_terminal = console.is_terminal and not console.is_dumb_terminal
        name = Column(min_width=max(map(len, names)))
        super().__init__(
            TextColumn("{task.description}", table_column=name),
            BarColumn(bar_width=20 if console.width >= 110 else 10),
            *map(_column, FIELDS),
            TimeRemainingColumn(compact=True, table_column=Column("left", no_wrap=True)),
            console=console,
            disable=not self.in_terminal,
        )
        self.names, self.epochs, self.dense = names, epochs, dense
        self.add_overview()
        self._bars = [self.add_bar(name, epochs) for name in names]

    def add_overview(self) -> None:
        """Add bars above those of the networks; here there are none."""

    def add_bar(self, name: str, total: int, completed: int = 0) -> Any:
        """Add a bar; its number."""
        blank: dict[str, Any] = dict.fromkeys(FIELDS, "")
        return self.add_task(name, total=total, completed=completed, **blank)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """The table of Rich, with headings."""
        table = super().make_tasks_table(tasks)
        table.show_header = True
        return table

    def show(self, epoch: int, statuses: Sequence[Status]) -> None:
        """Show the status of every network after an epoch."""
        for name, bar, now in zip(self.names, self._bars, statuses, strict=True):
            fields: Any = {"epoch": f"{epoch}/{self.epochs}", **now.fields(self.dense)}
            self.update(bar, completed=epoch, **fields)
            if not self.in_terminal and self._has_line(epoch):
                text = "{epoch} loss {loss} units {units} MACs {MACs} (expected {expected})"
                line = f"{name}  {text.format(**fields)}"
                self.console.print(line, highlight=False, soft_wrap=True)

    def _has_line(self, epoch: int) -> bool:
        return epoch == self.epochs or epoch % max(1, self.epochs // LINES) == 0


def _column(field: str) -> TextColumn:
    text = f"{{task.fields[{field}]}}"
    if field == "units":  # many groups are cut short
        return TextColumn(text, table_column=Column(field, overflow="ellipsis"))
    heading = Column(field, justify="right", no_wrap=True)
    return TextColumn(text, justify="right", table_column=heading)
