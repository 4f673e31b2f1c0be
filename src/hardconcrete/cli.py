"""The command line: arguments only. Torch is imported when a command runs, not before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

import hardconcrete
from hardconcrete.errors import HardConcreteError

if TYPE_CHECKING:
    from hardconcrete.paper.demo import Demo
    from hardconcrete.paper.examination import Result
    from hardconcrete.paper.experiment import Experiment
    from hardconcrete.paper.figures import Drawing

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train any PyTorch network to be small: L0 regularization with hard concrete gates.",
    epilog="Begin with `hardconcrete demo`.",
)
reproduce = typer.Typer(no_args_is_help=True, help="Reproduce the paper, row by row.")
app.add_typer(reproduce, name="reproduce")


class ManyValues(TyperCommand):
    """A command whose list options take all their values at once: ``--seeds 0 1 2``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each further value, as the parser wants it."""
        many = {
            name
            for option in self.params
            if getattr(option, "multiple", False)
            for name in option.opts
        }
        expanded: list[str] = []
        current = None
        for arg in args:
            if arg.startswith("--"):
                current = arg if arg in many else None
            elif current and expanded[-1] != current:
                expanded.append(current)
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


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
def demo(
    out: Out = Path("report"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with MNIST; else HARDCONCRETE_DATA, the cache, or a download."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of both networks.")] = 0,
) -> None:
    """See one gate at work, then watch a network learn which of its own units to drop."""
    with refusals_in_words():
        from hardconcrete.paper.demo import demo as run_demo
        from hardconcrete.paper.demo import find_data
        from hardconcrete.paper.figures import figure2

        show(figure2(out), "A gate: figure 2 of the paper, log alpha = 0, temperature 0.5")
        train, test, title = find_data(data)
        typer.echo(f"\nA gate on every input and hidden unit of a network; data: {title}")
        show_demo(run_demo(train, test, out, seed))


def show_demo(found: "Demo") -> None:
    """Both networks side by side, and what was drawn."""
    table = Table("network", "test error", "pixels-hidden-hidden left", "multiply-adds")
    dense = found.outcomes[0].macs
    for row in found.outcomes:
        share = f"{row.macs:,.0f} ({row.macs / dense:.0%})"
        table.add_row(row.name, f"{row.error:.2f}%", "-".join(map(str, row.units)), share)
    console = Console()
    console.print(table)
    console.print(f"\nThe gated network, made small and proven equal: {found.plan}\n")
    typer.echo(str(found.report))
    for file in found.files:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)


@app.command()
def groups(
    model: Annotated[str, typer.Argument(help="package.module:factory; a class or a function.")],
    input: Annotated[  # noqa: A002  (the option is called --input)
        list[str], typer.Option(help="Shape of an input, 1,3,32,32, or 2,16:int64 for others.")
    ],
    input_features: Annotated[
        bool, typer.Option("--input-features", help="Count the model's own inputs as units, too.")
    ] = False,
) -> None:
    """Print the units of any importable model that could go, and what is fixed and why.

    Example: hardconcrete groups hardconcrete.paper.models:LeNet5 --input 1,1,28,28
    """
    with refusals_in_words():
        from hardconcrete.report.importing import example_input, import_model
        from hardconcrete.structure import find_groups

        inputs = tuple(example_input(shape) for shape in input)
        typer.echo(str(find_groups(import_model(model), inputs, input_features=input_features)))


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


Runs = Annotated[Path, typer.Option(help="Folder for the files of the runs.")]
Lam = Annotated[list[float], typer.Option(help="Lambda times N: one number, or one per group.")]
Seeds = Annotated[list[int], typer.Option(help="Seeds, trained side by side: --seeds 0 1 2.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training images.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with MNIST; else HARDCONCRETE_DATA, the cache, or a download."),
]
Validate = Annotated[
    bool,
    typer.Option("--validate", help="Test on 5,000 held-out training images, not on the test set."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]


def reproduce_row(
    network: str, lam: list[float], seeds: list[int], epochs: int, validate: bool, **where: Any
) -> None:
    """Train an experiment and print it beside the paper's row."""
    with refusals_in_words():
        from hardconcrete.paper.experiment import Experiment
        from hardconcrete.paper.mnist import run

        experiment = Experiment(network, tuple(lam), tuple(seeds), epochs, validate)
        try:
            results = run(experiment, **where)
        except KeyboardInterrupt:
            typer.echo("stopped; the same command with --resume continues from the last checkpoint")
            raise typer.Exit(130) from None
        show_results(experiment, results)


def show_results(experiment: "Experiment", results: "list[Result]") -> None:
    """A row per seed, and the paper's where it has one."""
    from hardconcrete.paper.experiment import NETWORKS

    network = NETWORKS[experiment.network]
    tested = "validation" if experiment.validate else "test"
    table = Table("", "units left", f"{tested} error", "FLOPs expected", "delivered", "dense", "s")
    for column in table.columns[2:]:
        column.justify = "right"
    table.columns[1].no_wrap = True
    table.columns[1].min_width = max(len(row) for row in ("units left", *units_of(results)))
    for row, units in zip(results, units_of(results), strict=True):
        flops = (row.expected_flops, row.delivered_flops, row.dense_flops)
        counts = (f"{count / 1000:,.0f}k" for count in flops)
        table.add_row(f"seed {row.seed}", units, f"{row.error:.2f}%", *counts, f"{row.seconds:.0f}")
    if experiment.lam in network.rows:
        title, units, error = network.rows[experiment.lam]
        table.add_row(f"paper, {title}", units, f"{error:.1f}%", "", "", "", "", style="bold")
    Console().print(table)


def units_of(results: "list[Result]") -> list[str]:
    """Units left as the paper writes them."""
    return ["-".join(map(str, row.units)) for row in results]


def add_row(network: str, help_text: str) -> None:
    """Add the command that reproduces the rows of a network."""

    @reproduce.command(network, cls=ManyValues, help=help_text)
    def row(
        lam: Lam = [0.1],  # noqa: B006  (typer copies it)
        seeds: Seeds = [0],  # noqa: B006
        epochs: Epochs = 200,
        device: Device = "auto",
        out: Runs = Path("runs"),
        data: Data = None,
        validate: Validate = False,
        resume: Resume = False,
    ) -> None:
        where = {"out": out, "data": data, "device": device, "resume": resume}
        reproduce_row(network, lam, seeds, epochs, validate, **where)


add_row("mlp", "Table 1, MLP 784-300-100: --lam 0.1, or separately --lam 0.1 0.5 5.")
add_row("lenet5", "Table 1, LeNet-5 20-50-800-500: --lam 0.1, or separately --lam 10 0.5 0.1 10.")
