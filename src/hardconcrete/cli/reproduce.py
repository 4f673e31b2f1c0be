"""``hardconcrete reproduce``: every table and figure of the paper."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hardconcrete.cli.words import (
    Macs,
    ManyValues,
    Out,
    Params,
    interrupts_in_words,
    refusals_in_words,
    refuse_targets,
    show,
)

if TYPE_CHECKING:
    from hardconcrete.paper.examination import Result
    from hardconcrete.paper.experiment import Experiment

reproduce = typer.Typer(no_args_is_help=True, help="Reproduce the paper, row by row.")

Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the samples in part (b).")]
Samples = Annotated[int, typer.Option(min=1, help="Samples averaged in part (b).")]


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
Lam = Annotated[
    list[float] | None,
    typer.Option(help="Lambda times N: one number, 0.1 by default, or one per group."),
]
Seeds = Annotated[list[int], typer.Option(help="Seeds, trained side by side: --seeds 0 1 2.")]
Decay = Annotated[
    float,
    typer.Option(min=0.0, help="Coefficient of the L2 norm, expected under the gates; none at 0."),
]
PerExample = Annotated[
    bool, typer.Option("--per-example", help="Gates for every example, not one draw per batch.")
]
Shrink = Annotated[
    int, typer.Option(min=0, help="Remove units shut for so many epochs while training; 0: never.")
]
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
    network: str,
    lam: list[float] | None,
    limits: dict[str, float | None],
    seeds: list[int],
    settings: dict[str, Any],
    **where: Any,
) -> None:
    """Train an experiment and print it beside the paper's row."""
    with interrupts_in_words("with --resume "):
        refuse_targets(bool(lam), **limits)
        from hardconcrete.paper.experiment import Experiment
        from hardconcrete.paper.mnist import run

        if limits["macs"] is limits["params"] is None:
            lams: tuple[float, ...] = tuple(lam or [0.1])
        else:
            lams, settings = (), {**settings, **limits, "method": "budget"}
        experiment = Experiment(network, lams, tuple(seeds), **settings)
        show_results(experiment, run(experiment, **where, say=typer.echo))


def show_results(experiment: "Experiment", results: "list[Result]") -> None:
    """A row per seed, and the paper's where it has one."""
    from hardconcrete.paper.experiment import NETWORKS

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


def units_of(results: "list[Result]") -> list[str]:
    """Units left as the paper writes them."""
    return ["-".join(map(str, row.units)) for row in results]


def add_row(network: str, help_text: str) -> None:
    """Add the command that reproduces the rows of a network."""

    @reproduce.command(network, cls=ManyValues, help=help_text)
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
        data: Data = None,
        validate: Validate = False,
        resume: Resume = False,
    ) -> None:
        where = {"out": out, "data": data, "device": device, "resume": resume}
        settings: Any = {"epochs": epochs, "validate": validate, "shrink": shrink}
        settings |= {"weight_decay": weight_decay, "per_example": per_example}
        reproduce_row(network, lam, {"macs": macs, "params": params}, seeds, settings, **where)


add_row("mlp", "Table 1, MLP 784-300-100: --lam 0.1, or separately --lam 0.1 0.5 5.")
add_row("lenet5", "Table 1, LeNet-5 20-50-800-500: --lam 0.1, or separately --lam 10 0.5 0.1 10.")


Results = Annotated[Path, typer.Option(help="Folder for the table and its picture.")]
Sweeps = Annotated[Path, typer.Option(help="Folder for the runs; a second call continues there.")]
Count = Annotated[int, typer.Option(min=1, help="Seeds of every row, from 0 on.")]


@reproduce.command("table1")
def reproduce_table1(
    seeds: Count = 5,
    faithful: Annotated[
        bool,
        typer.Option(
            "--faithful",
            help="The L0 rows as the authors' code trains them: what differs, by itself, then all.",
        ),
    ] = False,
    epochs: Epochs = 200,
    device: Device = "auto",
    out: Results = Path("results"),
    runs: Sweeps = Path("runs/table1"),
    data: Data = None,
    validate: Validate = False,
) -> None:
    """Train every row of table 1, dense and dropout networks too; write CSV, Markdown and a plot.

    Eleven minutes on an H200, most of a day on two CPU cores; interrupted, call it again.
    """
    with interrupts_in_words(""):
        from hardconcrete.paper.table1 import experiments, markdown, table1

        chosen = experiments(seeds, epochs, faithful=faithful, validate=validate)
        name = "-".join(["table1", *["faithful"] * faithful, *["validate"] * validate])
        where = {"runs": runs, "data": data, "device": device, "say": typer.echo}
        rows, files = table1(chosen, out=out, name=name, **where)
        typer.echo(markdown(rows))
        for file in files:
            typer.echo(f"wrote {file}")


@reproduce.command("figure3")
def reproduce_figure3(
    seeds: Count = 5,
    epochs: Epochs = 200,
    device: Device = "auto",
    out: Results = Path("results"),
    runs: Sweeps = Path("runs/table1"),
    data: Data = None,
) -> None:
    """Draw expected and delivered FLOPs over training; trains the L0 rows of table 1 if needed."""
    with interrupts_in_words(""):
        from hardconcrete.paper.figure3 import figure3
        from hardconcrete.paper.table1 import experiments, train
        from hardconcrete.report.plots import check_plotting

        check_plotting(out)
        chosen = [each for each in experiments(seeds, epochs) if each.method == "l0"]
        rows = train(chosen, runs=runs, data=data, device=device, say=typer.echo)
        show(figure3(rows, runs, out), "Figure 3: MFLOPs per image")


@reproduce.command("gallery")
def reproduce_gallery(out: Out = Path("docs"), runs: Sweeps = Path("runs/table1")) -> None:
    """Draw pixels, gates and filters over training, from the runs of table1, as a page."""
    with refusals_in_words():
        from hardconcrete.paper.gallery import gallery

        for file in gallery(runs, out):
            typer.echo(f"wrote {file}")


@reproduce.command("wrn")
def reproduce_wrn(
    dataset: Annotated[str, typer.Option(help="cifar10 or cifar100.")] = "cifar10",
    variant: Annotated[str, typer.Option(help="dense, dropout, l0 or budget.")] = "l0",
    network: Annotated[str, typer.Option(help="wrn-28-10, resnet-110, preact-110.")] = "wrn-28-10",
    lam: Annotated[
        float | None, typer.Option(help="Lambda times N, for l0; 0.001 if not told.")
    ] = None,
    macs: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Part of the multiply-adds, for budget; 0.5 if none is told."
        ),
    ] = None,
    params: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Part of the parameters, for budget.")
    ] = None,
    gate_lr: Annotated[
        float | None, typer.Option(help="Gates in Adam at this rate, outside the schedule.")
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="Part of the training in which the budget comes down; 0.1 if not told."),
    ] = None,
    swa: Annotated[
        float | None,
        typer.Option(
            help="After this part of the training the learning rate stays; weights are averaged."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data and gates.")] = 0,
    epochs: Epochs = 200,
    noise: Annotated[
        bool, typer.Option("--noise", help="What a budget leaves is still dropped now and then.")
    ] = False,
    shrink: Shrink = 0,
    faithful: Annotated[
        bool, typer.Option("--faithful", help="Gates before the norm, two draws per batch.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Stop cleanly, between epochs, after so many; --resume continues."
        ),
    ] = None,
    device: Device = "auto",
    out: Runs = Path("runs"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with CIFAR; else HARDCONCRETE_DATA, the cache, or a download."),
    ] = None,
    validate: Validate = False,
    resume: Resume = False,
) -> None:
    """Table 2: a wide residual network on CIFAR; under torchrun, on several GPUs."""
    with interrupts_in_words("with --resume "):
        from hardconcrete.paper.processes import processes, rank
        from hardconcrete.paper.wide import WideExperiment
        from hardconcrete.paper.wide_run import run_wide

        chosen: Any = {"dataset": dataset, "variant": variant, "network": network}
        setting: Any = {"lam": lam, "macs": macs, "params": params, "gate_lr": gate_lr}
        flags: Any = {"seed": seed, "epochs": epochs, "faithful": faithful, "validate": validate}
        flags |= {"noise": noise, "shrink": shrink, "warmup": warmup, "swa": swa}
        experiment = WideExperiment(**chosen, **setting, **flags)
        with processes(device) as place:
            where: Any = {"out": out, "data": data, "device": place, "resume": resume}
            result = run_wide(experiment, **where, minutes=max_minutes, say=typer.echo)
            first = rank() == 0
        if result is None:
            if first:  # of several processes the others have no result
                typer.echo("not at its end yet; the same command with --resume continues")
            return
        table = Table("test error", "as trained last", "MACs", "parameters", "images/s", "s")
        share = f"{result.macs[0] / 1e6:,.0f}M ({result.macs[0] / result.macs[1]:.1%})"
        weights = f"{result.params[0] / 1e6:.2f}M ({result.params[0] / result.params[1]:.1%})"
        errors = f"{result.error:.2f}%", f"{result.raw_error:.2f}%"
        rates = f"{result.images_per_second:,.0f}", f"{result.seconds:.0f}"
        table.add_row(*errors, share, weights, *rates)
        Console().print(table)


@reproduce.command("table2")
def reproduce_table2(out: Results = Path("results"), runs: Runs = Path("runs")) -> None:
    """Write table 2 from the runs of `reproduce wrn` that are at their end."""
    with refusals_in_words():
        from hardconcrete.paper.table2 import table2

        page = table2(runs)
        out.mkdir(parents=True, exist_ok=True)
        (out / "table2.md").write_text(page)
        typer.echo(page)
        typer.echo(f"wrote {out / 'table2.md'}")


@reproduce.command("figure4")
def reproduce_figure4(out: Results = Path("results"), runs: Runs = Path("runs")) -> None:
    """Draw FLOPs and errors over training from the runs of `reproduce wrn`."""
    with refusals_in_words():
        from hardconcrete.paper.table2 import figure4

        show(figure4(runs, out), "Figure 4: GFLOPs per image")
