"""A line in a terminal that shows how far pruning has come."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class PruningProgress(Progress):
    """A live bar over the stages; silent where there is no terminal.

    Args:
        stages: how many there are.
        show: False for none, True for one wherever the output goes, None for one in a terminal.
        title: stands before the bar.

    Example:
        >>> with PruningProgress(stages=6, show=False) as progress:
        ...     progress.say(1, "importance")
    """

    def __init__(self, stages: int, show: bool | None, title: str = "pruning") -> None:
        console = Console(stderr=True, force_terminal=True if show else None)
        in_terminal = console.is_terminal and not console.is_dumb_terminal
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}"),
            console=console,
            transient=True,
            disable=show is False or not (show or in_terminal),
        )
        self._stages = stages
        self._bar = self.add_task(title, total=2 * stages + 1, doing="")

    def say(self, stage: int, doing: str) -> None:
        """Show the step that begins: importance, or re-fit, of a stage from 1."""
        done = 2 * (stage - 1) + (doing != "importance")
        self.update(self._bar, completed=done, doing=f"stage {stage} of {self._stages}: {doing}")

    def finish(self, doing: str) -> None:
        """Show what is done after all stages."""
        self.update(self._bar, completed=2 * self._stages, doing=doing)
