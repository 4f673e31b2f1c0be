"""What the commands share: options, refusals in words, and how a figure is shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hardconcrete.errors import ArgumentError, HardConcreteError

if TYPE_CHECKING:
    from hardconcrete.report import Drawing

Out = Annotated[Path, typer.Option(help="Folder for what is drawn; made if it is missing.")]
Macs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Instead of a lambda: the part of the dense multiply-adds to keep, 0.3.",
    ),
]
Params = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Likewise: the part of the dense parameters to keep."),
]


def refuse_targets(lam: bool, macs: float | None, params: float | None) -> None:
    """A lambda says how much a unit costs, a budget what all of them may: one of both, above 0."""
    if lam and not macs is params is None:
        raise ArgumentError("--lam and a budget (--macs, --params) exclude each other")
    if 0 in (macs, params):
        raise ArgumentError("a budget of nothing leaves nothing: --macs and --params are above 0")


@contextmanager
def refusals_in_words() -> Iterator[None]:
    """An error of ours is a message and an exit status, not a traceback."""
    try:
        yield
    except (HardConcreteError, OSError) as error:
        console = Console(stderr=True)
        console.print("error: ", style="bold red", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def show(drawing: "Drawing", title: str) -> None:
    """The facts of a figure and where it was written."""
    console = Console()
    table = Table("fact", "value", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for fact, value in drawing.facts.items():
        table.add_row(fact, f"{value:.4f}")
    console.print(table)
    for file in drawing.files:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
