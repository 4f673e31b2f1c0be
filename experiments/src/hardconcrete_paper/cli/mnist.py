"""The commands for table 1, figure 3 and the gallery: networks on MNIST."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hardconcrete.cli import Macs, Out, Params, refusals_in_words, refuse_targets, show
from hardconcrete_paper.cli.options import (
    Device,
    Epochs,
    ManyValues,
    Mnist,
    Results,
    Resume,
    Runs,
    Seeds,
    Shrink,
    Sweeps,
    Validate,
    interrupts_in_words,
)

if TYPE_CHECKING:
    from hardconcrete_paper.mnist.examination import MnistResult
    from hardconcrete_paper.mnist.experiment import MnistExperiment

FIVE_SEEDS = [0, 1, 2, 3, 4]
"""The seeds of each row of table 1."""

Lam = Annotated[
    list[float] | None,
    typer.Option(help="Lambda times N: one number, 0.1 by default, or one per group."),
]
Decay = Annotated[
    float,
    typer.Option(min=0.0, help="Coefficient of the L2 norm, expected under the gates; none at 0."),
]
PerExample = Annotated[
    bool, typer.Option("--per-example", help="Gates for every example, not one draw per batch.")
]
Faithful = Annotated[
    bool,
    typer.Option(
        "--faithful",
        help="The L0 rows as the authors' code trains them: each difference alone, then all.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    add_row(app, "mlp", "MLP 784-300-100: --lam 0.1, or separately --lam 0.1 0.5 5.")
    add_row(app, "lenet5", "LeNet-5 20-50-800-500: --lam 0.1, or separately --lam 10 0.5 0.1 10.")
    app.command("table1", cls=ManyValues)(table1)
    app.command("figure3", cls=ManyValues)(figure3)
    app.command("gallery")(gallery)


def add_row(app: typer.Typer, network: str, help_text: str) -> None:
    """Add the command that trains one row of a network."""

    @app.command(network, cls=ManyValues, help=f"Train one row of table 1, {help_text}")
    def row(
        lam: Lam = None,
        macs: Macs = None,
        params: Params = None,
        seeds: Seeds = [0],  # noqa: B006  (typer copies it)
        epochs: Epochs = 200,
        weight_decay: Decay = 0.0,
        per_example: PerExample = False,
        shrink: Shrink = 0,
        device: Device = "auto",
        out: Runs = Path("runs"),
        data: Mnist = None,
        validate: Validate = False,
        resume: Resume = False,
    ) -> None:
        where = {"out": out, "data": data, "device": device, "resume": resume}
        settings: Any = {"epochs": epochs, "validate": validate, "shrink": shrink}
        settings |= {"weight_decay": weight_decay, "per_example": per_example}
        train_row(network, lam, {"macs": macs, "params": params}, seeds, settings, **where)


def train_row(
    network: str,
    lam: list[float] | None,
    limits: dict[str, float | None],
    seeds: list[int],
    settings: dict[str, Any],
    **where: Any,
) -> None:
    """Train an experiment and print it with the paper's row."""
    with interrupts_in_words("with --resume "):
        refuse_targets(bool(lam), **limits)
        from hardconcrete_paper.mnist.experiment import MnistExperiment
        from hardconcrete_paper.mnist.run import run

        if limits["macs"] is limits["params"] is None:
            lams: tuple[float, ...] = tuple(lam or [0.1])
        else:
            lams, settings = (), {**settings, **limits, "method": "budget"}
        experiment = MnistExperiment(network, lams, tuple(seeds), **settings)
        show_results(experiment, run(experiment, **where, say=typer.echo))


def show_results(experiment: "MnistExperiment", results: "list[MnistResult]") -> None:
    """A row per seed, and the paper's where it has one."""
    from hardconcrete_paper.mnist.experiment import NETWORKS

    network = NETWORKS[experiment.network]
    tested = "held-out" if experiment.validate else "test"
    left = "units as trained" if experiment.method == "budget" else "units left"
    counts_and_time = "FLOPs expected", "delivered", "dense", "s"
    table = Table("", left, f"{tested} error", *counts_and_time)
    for column in table.columns[2:]:
        column.justify = "right"
    table.columns[1].no_wrap = True
    table.columns[1].min_width = max(len(row) for row in (left, *units_of(results)))
    for row, units in zip(results, units_of(results), strict=True):
        kept = row.small_flops if experiment.method == "budget" else row.delivered_flops
        flops = (row.expected_flops, kept, row.dense_flops)
        counts = (f"{count / 1000:,.0f}k" for count in flops)
        table.add_row(f"seed {row.seed}", units, f"{row.error:.2f}%", *counts, f"{row.seconds:.0f}")
    if experiment.lam in network.rows:
        title, units, error = network.rows[experiment.lam]
        title += ", no L2" if experiment.weight_decay else ""
        table.add_row(f"paper, {title}", units, f"{error:.1f}%", "", "", "", "", style="bold")
    Console().print(table)


def units_of(results: "list[MnistResult]") -> list[str]:
    """Units left as the paper writes them."""
    return ["-".join(map(str, row.units)) for row in results]


def table1(
    seeds: Seeds = FIVE_SEEDS,
    faithful: Faithful = False,
    epochs: Epochs = 200,
    device: Device = "auto",
    out: Results = Path("results"),
    runs: Sweeps = Path("runs/table1"),
    data: Mnist = None,
    validate: Validate = False,
) -> None:
    """Train every row of table 1, dense and dropout networks too; write CSV, Markdown and a plot.

    Eleven minutes on an H200, most of a day on two CPU cores; interrupted, call it again.
    """
    with interrupts_in_words(""):
        from hardconcrete_paper.mnist.table1 import experiments, markdown, table1

        chosen = experiments(tuple(seeds), epochs, faithful=faithful, validate=validate)
        name = "-".join(["table1", *["faithful"] * faithful, *["validate"] * validate])
        where = {"runs": runs, "data": data, "device": device, "say": typer.echo}
        rows, files = table1(chosen, out=out, name=name, **where)
        typer.echo(markdown(rows))
        for file in files:
            typer.echo(f"wrote {file}")


def figure3(
    seeds: Seeds = FIVE_SEEDS,
    epochs: Epochs = 200,
    device: Device = "auto",
    out: Results = Path("results"),
    runs: Sweeps = Path("runs/table1"),
    data: Mnist = None,
) -> None:
    """Draw expected and delivered FLOPs over training; trains the L0 rows of table 1 if needed."""
    with interrupts_in_words(""):
        from hardconcrete.report import check_plotting
        from hardconcrete_paper.mnist.figure3 import figure3
        from hardconcrete_paper.mnist.table1 import experiments, train

        check_plotting(out)
        chosen = [each for each in experiments(tuple(seeds), epochs) if each.method == "l0"]
        rows = train(chosen, runs=runs, data=data, device=device, say=typer.echo)
        show(figure3(rows, runs, out), "Figure 3: MFLOPs per image")


def gallery(out: Out = Path("docs"), runs: Sweeps = Path("runs/table1")) -> None:
    """Draw pixels, gates and filters over training, from the runs of table1, as a page."""
    with refusals_in_words():
        from hardconcrete_paper.mnist.gallery import gallery

        for file in gallery(runs, out):
            typer.echo(f"wrote {file}")
