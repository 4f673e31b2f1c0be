"""The command line: arguments only. Torch is imported when a command runs, not before."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

import hardconcrete
from hardconcrete.cli.words import Macs, Out, Params, refusals_in_words, refuse_targets, show

if TYPE_CHECKING:
    from hardconcrete.demo import Demo

__all__ = ["Macs", "Out", "Params", "app", "refusals_in_words", "refuse_targets", "show"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train any PyTorch network to be small: L0 regularization with hard concrete gates.",
    epilog="Begin with `hardconcrete demo`.",
)


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
def demo(
    out: Out = Path("report"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with MNIST; else HARDCONCRETE_DATA, the cache, or a download."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of both networks.")] = 0,
    lam: Annotated[
        float | None, typer.Option(min=0, help="Lambda times the number of training images.")
    ] = None,
    macs: Macs = None,
    params: Params = None,
    method: Annotated[
        str, typer.Option(help="Of the gates, such as sbp or group-lasso; see docs/methods.md.")
    ] = "hard-concrete",
) -> None:
    """See one gate at work, then watch a network learn which of its units to drop."""
    with refusals_in_words():
        refuse_targets(lam is not None, macs, params)
        from hardconcrete.demo import figure2, find_data, run_demo

        train, test, title = find_data(data)
        show(figure2(out), "A gate: figure 2 of the paper, log alpha = 0, temperature 0.5")
        typer.echo(f"\nA gate on every input and hidden unit of a network; data: {title}")
        demo = run_demo(train, test, out, seed, lam=lam, macs=macs, params=params, method=method)
        show_demo(demo)


def show_demo(result: "Demo") -> None:
    """Print both networks in a table, the report, and the files."""
    heads = "network", "test error", "pixels-hidden-hidden left", "multiply-adds", "expected"
    table, dense = Table(*heads), result.outcomes[0].macs
    for row in result.outcomes:
        units, share = "-".join(map(str, row.units)), f"{row.macs:,.0f} ({row.macs / dense:.0%})"
        table.add_row(row.name, f"{row.error:.2f}%", units, share, f"{row.expected / dense:.0%}")
    console = Console()
    console.print(table)
    console.print(f"\nThe gated network, made small and proven equal: {result.plan}\n")
    typer.echo(str(result.report))
    for file in result.files:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)


@app.command()
def groups(
    model: Annotated[str, typer.Argument(help="package.module:factory; a class or a function.")],
    input: Annotated[  # noqa: A002  (the option is called --input)
        list[str], typer.Option(help="Shape of an input, 1,3,32,32, or 2,16:int64 for others.")
    ],
    input_features: Annotated[
        bool, typer.Option("--input-features", help="Count the inputs of the model as units, too.")
    ] = False,
) -> None:
    """Print the units of any importable model that could go, and what is fixed and why.

    Example: hardconcrete groups hardconcrete.demo:MLP --input 1,1,28,28
    """
    with refusals_in_words():
        from hardconcrete.cli.model_arguments import example_input, import_model
        from hardconcrete.units import find_groups

        inputs = tuple(example_input(shape) for shape in input)
        typer.echo(str(find_groups(import_model(model), inputs, input_features=input_features)))
