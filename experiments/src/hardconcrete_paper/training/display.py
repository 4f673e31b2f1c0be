"""The display of one run among several."""

from collections.abc import Sequence
from dataclasses import dataclass

from hardconcrete.demo import Display, Status


@dataclass(frozen=True)
class Sweep:
    """One of several runs: its title, its number from 1, and how many there are."""

    title: str
    number: int
    runs: int


class SweepDisplay(Display):
    """The status of several networks, below a bar for the whole sweep."""

    def __init__(
        self,
        names: Sequence[str],
        epochs: int,
        dense: float,
        sweep: Sweep | None = None,
        *,
        silent: bool = False,
    ) -> None:
        self._sweep = sweep
        super().__init__(names, epochs, dense, silent=silent)

    def add_overview(self) -> None:
        """Add the bar of the sweep; without a terminal, print its title."""
        if self._sweep is None:
            return
        title = f"run {self._sweep.number} of {self._sweep.runs}: {self._sweep.title}"
        self._before = (self._sweep.number - 1) * self.epochs
        self._overview = self.add_bar(title, self._sweep.runs * self.epochs, self._before)
        if not self.in_terminal:
            self.console.print(title, highlight=False, soft_wrap=True)

    def show(self, epoch: int, statuses: Sequence[Status]) -> None:
        """Show the status of every network after an epoch."""
        if self._sweep is not None:
            self.update(self._overview, completed=self._before + epoch)
        super().show(epoch, statuses)
