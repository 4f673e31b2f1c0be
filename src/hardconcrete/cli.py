"""The command line: arguments only. Torch is imported when a command runs, not before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

import hardconcrete
from hardconcrete.errors import HardConcreteError

if TYPE_CHECKING:
    from hardconcrete.paper.figures import Drawing

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train any PyTorch network to be small: L0 regularization with hard concrete gates.",
    epilog="Begin with `hardconcrete demo`.",
)
reproduce = typer.Typer(no_args_is_help=True, help="Reproduce the paper, figure by figure.")
app.add_typer(reproduce, name="reproduce")

Out = Annotated[Path, typer.Option(help="Folder for what is drawn; made if it is missing.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the samples in part (b).")]
Samples = Annotated[int, typer.Option(min=1, help="Samples averaged in part (b).")]


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


def print_version(wanted: bool) -> None:
    """Answer ``--version`` and stop."""
    if wanted:
        typer.echo(f"hardconcrete {hardconcrete.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Train any PyTorch network to be small."""


@app.command()
def demo(out: Out = Path("report")) -> None:
    """See the hard concrete distribution at work: figure 2 of the paper and the facts in it."""
    with refusals_in_words():
        from hardconcrete.paper.figures import figure2

        show(figure2(out), "The hard concrete gate at log alpha = 0, temperature 0.5")
    typer.echo(
        "A gate is exactly 0 or exactly 1 about half of the time, and has a gradient in between."
    )


@reproduce.command("figure1")
def reproduce_figure1(out: Out = Path("report")) -> None:
    """Draw the L_p penalties: why only p = 0 prunes without shrinking what stays."""
    with refusals_in_words():
        from hardconcrete.paper.figures import figure1

        show(figure1(out), "Figure 1")


@reproduce.command("figure2")
def reproduce_figure2(out: Out = Path("report"), samples: Samples = 10_000, seed: Seed = 0) -> None:
    """Draw the binary and the hard concrete, and their means over log alpha."""
    with refusals_in_words():
        from hardconcrete.paper.figures import figure2

        show(figure2(out, samples=samples, seed=seed), "Figure 2")
