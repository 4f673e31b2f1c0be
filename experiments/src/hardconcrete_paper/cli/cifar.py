"""The commands for table 2 and figure 4: residual networks on CIFAR."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hardconcrete.cli import refusals_in_words, show
from hardconcrete_paper.cli.options import (
    Cifar,
    Device,
    Epochs,
    ManyValues,
    Results,
    Resume,
    Runs,
    Seeds,
    Shrink,
    Validate,
    interrupts_in_words,
)

if TYPE_CHECKING:
    from hardconcrete_paper.cifar.examination import CifarResult


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("wrn", cls=ManyValues)(wrn)
    app.command("table2")(table2)
    app.command("figure4")(figure4)


def wrn(
    dataset: Annotated[str, typer.Option(help="cifar10 or cifar100.")] = "cifar10",
    variant: Annotated[str, typer.Option(help="dense, dropout, l0 or budget.")] = "l0",
    network: Annotated[str, typer.Option(help="wrn-28-10, resnet-110, preact-110.")] = "wrn-28-10",
    lam: Annotated[
        float | None, typer.Option(help="Lambda times N, for l0; 0.001 by default.")
    ] = None,
    macs: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Part of the multiply-adds, for budget; 0.5 without --params."
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
        typer.Option(help="Part of the training in which the budget comes down; 0.1 by default."),
    ] = None,
    swa: Annotated[
        float | None,
        typer.Option(
            help="After this part of the training the learning rate stays; weights are averaged."
        ),
    ] = None,
    seeds: Seeds = [0],  # noqa: B006  (typer copies it)
    epochs: Epochs = 200,
    noise: Annotated[
        bool, typer.Option("--noise", help="Units that a budget keeps are still dropped at times.")
    ] = False,
    shrink: Shrink = 0,
    paper_gates: Annotated[
        bool,
        typer.Option(
            "--paper-gates", help="Gates before the norm and two draws per batch, as in the paper."
        ),
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Stop cleanly, between epochs, after so many; --resume continues."
        ),
    ] = None,
    device: Device = "auto",
    out: Runs = Path("runs"),
    data: Cifar = None,
    validate: Validate = False,
    resume: Resume = False,
) -> None:
    """Train a row of table 2, one seed after the other; under torchrun, on several GPUs."""
    with interrupts_in_words("with --resume "):
        from hardconcrete_paper.cifar.experiment import CifarExperiment
        from hardconcrete_paper.training.processes import processes

        chosen: Any = {"dataset": dataset, "variant": variant, "network": network}
        setting: Any = {"lam": lam, "macs": macs, "params": params, "gate_lr": gate_lr}
        flags: Any = {"epochs": epochs, "paper_gates": paper_gates, "validate": validate}
        flags |= {"noise": noise, "shrink": shrink, "warmup": warmup, "swa": swa}
        experiments = [
            CifarExperiment(**chosen, **setting, **flags, seed=seed)
            for seed in dict.fromkeys(seeds)
        ]
        with processes(device) as place:
            where: Any = {"out": out, "data": data, "device": place, "resume": resume}
            train_rows(experiments, max_minutes, **where)


def train_rows(experiments: list[Any], minutes: float | None, **where: Any) -> None:
    """Train networks in turn, until the minutes are over, and print each result."""
    from hardconcrete_paper.cifar.run import run
    from hardconcrete_paper.training.processes import agreed, rank

    began, remaining = time.perf_counter(), minutes
    for experiment in experiments:
        if minutes is not None and experiment is not experiments[0]:
            remaining = minutes - agreed(time.perf_counter() - began) / 60
        result = None
        if remaining is None or remaining >= 0:
            result = run(experiment, **where, minutes=remaining, say=typer.echo)
        finished = float(result is not None)  # of several processes the first has the result
        if experiment is not experiments[-1]:
            finished = agreed(finished)
        if result is not None:
            show_result(result)
        elif rank() == 0:
            typer.echo("not at its end yet; the same command with --resume continues")
        if not finished:
            return


def show_result(result: "CifarResult") -> None:
    """One row."""
    table = Table("test error", "as trained last", "MACs", "parameters", "images/s", "s")
    share = f"{result.macs[0] / 1e6:,.0f}M ({result.macs[0] / result.macs[1]:.1%})"
    weights = f"{result.params[0] / 1e6:.2f}M ({result.params[0] / result.params[1]:.1%})"
    errors = f"{result.error:.2f}%", f"{result.raw_error:.2f}%"
    rates = f"{result.images_per_second:,.0f}", f"{result.seconds:.0f}"
    table.add_row(*errors, share, weights, *rates)
    Console().print(table)


def table2(out: Results = Path("results"), runs: Runs = Path("runs")) -> None:
    """Write table 2 from the finished runs of wrn."""
    with refusals_in_words():
        from hardconcrete_paper.cifar.table2 import table2

        page = table2(runs)
        out.mkdir(parents=True, exist_ok=True)
        (out / "table2.md").write_text(page)
        typer.echo(page)
        typer.echo(f"wrote {out / 'table2.md'}")


def figure4(out: Results = Path("results"), runs: Runs = Path("runs")) -> None:
    """Draw FLOPs and errors over training from the runs of wrn."""
    with refusals_in_words():
        from hardconcrete_paper.cifar.table2 import figure4

        show(figure4(runs, out), "Figure 4: GFLOPs per image")
