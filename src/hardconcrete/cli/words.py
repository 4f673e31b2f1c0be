"""Shared by the commands: options, errors as messages, and tables of figures."""

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

Out = Annotated[Path, typer.Option(help="Folder for the results; made if it is missing.")]
Macs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Fraction of the dense multiply-adds to keep, such as 0.3; instead of a lambda.",
    ),
]
Params = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Fraction of the dense parameters to keep, likewise."),
]


def refuse_targets(lam: bool, macs: float | None, params: float | None) -> None:
    """Refuse a lambda together with a budget, and a budget of 0."""
    if lam and not macs is params is None:
        raise ArgumentError("--lam and a budget (--macs, --params) exclude each other")
    if 0 in (macs, params):
        raise ArgumentError("--macs and --params must be above 0")


@contextmanager
def refusals_in_words() -> Iterator[None]:
    """Print errors of hardconcrete as a message, without a traceback, and exit with status 1."""
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
