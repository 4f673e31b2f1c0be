"""Table 1: every row trained, compacted, tested once, and compared with the paper's."""

import csv
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hardconcrete.demo import scaled
from hardconcrete.demo.data import Images, load_mnist
from hardconcrete.errors import ArgumentError
from hardconcrete.report import BLUE, GREEN, ORANGE, PURPLE, VERMILION, check_plotting, save_figure
from hardconcrete_paper.data.hold_out import hold_out
from hardconcrete_paper.mnist.examination import LATENCY_BATCH, READOUTS, TUNING, MnistResult
from hardconcrete_paper.mnist.experiment import NETWORKS, QUIRKS, MnistExperiment, learner
from hardconcrete_paper.mnist.run import run
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.display import Sweep
from hardconcrete_paper.training.run_folder import RunFolder
from hardconcrete_paper.training.stacked_learners import StackedLearners

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]

TITLES = {"mlp": "MLP 784-300-100", "lenet5": "LeNet-5-Caffe 20-50-800-500"}

PUBLISHED = {
    "mlp": {
        "Sparse VD": ("512-114-72", 1.8, 67_500),
        "BC-GNJ": ("278-98-13", 1.8, 28_800),
        "BC-GHS": ("311-86-14", 1.8, 28_200),
        "L0, lambda = 0.1/N": ("219-214-100", 1.4, 69_600),
        "L0, lambda sep.": ("266-88-33", 1.8, 26_800),
    },
    "lenet5": {
        "Sparse VD": ("14-19-242-131", 1.0, 40_200),
        "GL": ("3-12-192-500", 1.0, 102_500),
        "GD": ("7-13-208-16", 1.1, 6_000),
        "SBP": ("3-18-284-283", 0.9, 84_900),
        "BC-GNJ": ("8-13-88-13", 1.0, 4_100),
        "BC-GHS": ("5-10-76-16", 1.0, 2_800),
        "L0, lambda = 0.1/N": ("20-25-45-462", 0.9, 38_900),
        "L0, lambda sep.": ("9-18-65-25", 1.0, 6_200),
    },
}
"""The paper's table: units left, error in percent; parameters follow from the units."""


@dataclass(frozen=True)
class Row:
    """A row of the table: what was trained, what came out, and the record of it."""

    experiment: MnistExperiment
    results: list[MnistResult]
    record: dict[str, Any]


def experiments(
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    epochs: int = 200,
    *,
    faithful: bool = False,
    validate: bool = False,
) -> list[MnistExperiment]:
    """What the table needs; ``faithful``: the L0 rows as the authors' code would train them.

    Example:
        >>> [each.name for each in experiments(epochs=1)][:4]
        ['mlp-dense', 'mlp-dropout', 'mlp-0.1', 'mlp-0.1-0.5-5']
        >>> [each.name for each in experiments(faithful=True)][-2:]
        ['lenet5-10-0.5-0.1-10-bias', 'lenet5-10-0.5-0.1-10-clamp-average-bias']
    """
    common: dict[str, Any] = {"seeds": seeds, "epochs": epochs, "validate": validate}
    rows = []
    for name, network in NETWORKS.items():
        if not faithful:
            for method in ("dense", "dropout"):
                rows.append(MnistExperiment(name, (), method=method, **common))
        for lam in network.rows:
            for quirks in _quirks(name) if faithful else [()]:
                rows.append(MnistExperiment(name, lam, quirks=quirks, **common))
    return rows


def _quirks(network: str) -> list[tuple[str, ...]]:
    """Each difference that acts on a network by itself, then all of them."""
    quirks = tuple(quirk for quirk in QUIRKS if quirk != "bias" or network == "lenet5")
    return [*((quirk,) for quirk in quirks), quirks]


def table1(
    chosen: Sequence[MnistExperiment], *, out: Path, name: str = "table1", **where: Any
) -> tuple[list[Row], tuple[Path, ...]]:
    """Train what is not trained yet, and write the table as CSV, Markdown and picture.

    Example:
        ``table1(experiments(), runs=Path("runs"), out=Path("results"))`` is what
        ``hardconcrete-paper table1`` runs. It can be stopped and called again.
    """
    check_plotting(out)
    rows = train(chosen, **where)
    return rows, write(rows, out, name)


def train(
    chosen: Sequence[MnistExperiment],
    *,
    runs: Path,
    data: Path | None = None,
    device: str = "auto",
    say: Say = print,
) -> list[Row]:
    """Train what is not trained yet, one experiment after the other."""
    if runs.exists() and not runs.is_dir():
        raise ArgumentError(f"--runs {runs} is a file, not a folder")
    for experiment in chosen:  # before any of them is trained
        RunFolder(runs / experiment.name).refuse_others(experiment.settings())
    waiting = [each for each in chosen if "results" not in _record(runs, each)]
    if waiting and choose_device(device).type == "cpu":
        training = load_mnist("train", data)
        if chosen[0].validate:
            training, _ = hold_out(training)
        seconds = sum(seconds_on_cpu(each, training, _epochs_done(runs, each)) for each in waiting)
        about = f"{seconds / 3600:.1f} hours" if seconds > 3600 else f"{seconds / 60:.0f} minutes"
        say(f"{len(waiting)} runs on this CPU will take about {about}")
    rows = []
    where: dict[str, Any] = {"out": runs, "data": data, "device": device, "say": say}
    for number, experiment in enumerate(chosen, 1):
        sweep = Sweep(f"{TITLES[experiment.network]}, {experiment.title}", number, len(chosen))
        results = run(experiment, **where, resume=True, sweep=sweep)
        rows.append(Row(experiment, results, _record(runs, experiment)))
    return rows


def write(rows: Sequence[Row], out: Path, name: str = "table1") -> tuple[Path, ...]:
    """The files of the table."""
    with (out / f"{name}.csv").open("w", newline="") as file:
        lines = [line for row in rows for line in _lines(row)]
        writer = csv.DictWriter(file, [*lines[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    (out / f"{name}.md").write_text(markdown(rows))
    return out / f"{name}.csv", out / f"{name}.md", *draw(rows, out, name)


def _epochs_done(runs: Path, experiment: MnistExperiment) -> int:
    lines = RunFolder(runs / experiment.name).lines()
    return lines[-1]["epoch"] if lines else 0


def seconds_on_cpu(
    experiment: MnistExperiment, training: Images, done: int = 0, steps: int = 5
) -> float:
    """How long an experiment would still train here, from a few steps of one seed."""
    one = learner(experiment, 0, len(training), torch.device("cpu"))
    few = training.images[:1000], training.labels[:1000]
    stack = StackedLearners([one], *few, prepare=scaled, compiled=False)
    stack.begin_epoch(0)
    stack.step()
    start = time.perf_counter()
    for _ in range(steps):
        stack.step()
    per_step = (time.perf_counter() - start) / steps
    epochs = experiment.epochs - done + TUNING.epochs
    return per_step * epochs * (len(training) // one.recipe.batch_size) * len(experiment.seeds)


def _record(runs: Path, experiment: MnistExperiment) -> dict[str, Any]:
    folder = RunFolder(runs / experiment.name)
    return folder.read() if folder.record.exists() else {}


def _lines(row: Row) -> Iterable[dict[str, Any]]:
    about = row.record["environment"]
    for result in row.results:
        yield {
            "network": row.experiment.network,
            "method": row.experiment.method,
            "lambdas": " ".join(f"{lam:g}/N" for lam in row.experiment.lam),
            "quirks": " ".join(row.experiment.quirks),
            "seed": result.seed,
            "units_left": "-".join(map(str, result.units)),
            "error": result.error,
            "disagreements": result.disagreements,
            "params": result.small_parameters,
            "macs": result.small_flops // 2,
            "expected_macs": round(result.expected_flops / 2),
            "cpu_ms": result.small_latency,
            "dense_cpu_ms": result.dense_latency,
            "tuned_error": result.tuned_error,
            "seconds_of_all_seeds": result.seconds,
            "epochs": row.experiment.epochs,
            "tested_on": row.record["tested_on"],
            **{key: about[key] for key in ("device", "threads", "torch", "python", "hardconcrete")},
            "commit": about["commit"],
            "date": about["date"],
        }


def spread(values: Sequence[float], form: str = "{:g}") -> str:
    """Median, with the smallest and the largest.

    Example:
        >>> spread([1.0, 1.25, 0.75], "{:.2f}%")
        '1.00% (0.75% to 1.25%)'
        >>> spread([3, 3])
        '3'
    """
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def markdown(rows: Sequence[Row]) -> str:
    """The table, the readouts and what tuning brings, as a page."""
    about, experiment = rows[0].record["environment"], rows[0].experiment
    seeds = len(experiment.seeds)
    commits = " and ".join(dict.fromkeys(str(row.record["environment"]["commit"]) for row in rows))
    quirks = dict.fromkeys(quirk for row in rows for quirk in row.experiment.quirks)
    threads = "one thread" if about["threads"] == 1 else f"{about['threads']} threads"
    parts = [
        "# Table 1 as the authors' code trains it\n" if quirks else "# Table 1\n",
        f"{seeds} {'seeds' if seeds > 1 else 'seed'} a row, {experiment.epochs} epochs, "
        f"tested on: {rows[0].record['tested_on']}. Median, and from the smallest to the largest. "
        "Error, parameters, multiply-adds and latency are those of the compacted network; units "
        "are gates that are left, as the paper counts. "
        f"{about['device']}, torch {about['torch']}, commit {commits}; latency of "
        f"{LATENCY_BATCH} images on the CPU of that machine, {threads}.\n",
        *(f"- {quirk}: {QUIRKS[quirk]}" for quirk in quirks),
        *[""] * bool(quirks),
    ]
    for network, title in TITLES.items():
        rows_of_network = [row for row in rows if row.experiment.network == network]
        if not rows_of_network:
            continue
        parts += [f"## {title}\n", *_main(rows_of_network), "", _about(rows_of_network)]
        parts += [_others(network), ""]
        gated = [row for row in rows_of_network if row.results[0].readouts]
        parts += ["### How a gate is read at test time\n", *_readouts(gated), ""]
        parts += ["### Five more epochs after compaction\n", *_tuning(rows_of_network), ""]
    parts.append(
        "`recalibrate` re-estimates batch norms; these networks have none, so it changes nothing."
    )
    return "\n".join(parts) + "\n"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(header)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def _units(results: Sequence[MnistResult]) -> str:
    """The median of every group, and each seed's."""
    groups = zip(*(result.units for result in results), strict=True)
    middle = "-".join(f"{statistics.median(group):g}" for group in groups)
    each = ", ".join(dict.fromkeys("-".join(map(str, r.units)) for r in results))
    return middle if each == middle else f"{middle} ({each})"


def _main(rows: Sequence[Row]) -> list[str]:
    header = (
        "method|units left|error|parameters|the paper's|MACs|expected"
        "|CPU ms|faster than dense|disagreements|training, s"
    )
    lines = []
    for row in rows:
        results = row.results
        lines.append(
            [
                row.experiment.title,
                _units(results),
                spread([r.error for r in results], "{:.2f}%"),
                spread([r.small_parameters / 1000 for r in results], "{:.1f}k"),
                _published(row.experiment),
                spread([r.small_flops / 2000 for r in results], "{:.0f}k"),
                spread([r.expected_flops / 2000 for r in results], "{:.0f}k"),
                spread([r.small_latency for r in results], "{:.2f}"),
                spread([r.dense_latency / r.small_latency for r in results], "{:.1f}x"),
                str(sum(r.disagreements for r in results)),
                f"{results[0].seconds:.0f}",
            ]
        )
    return _table(header.split("|"), lines)


def _published(experiment: MnistExperiment) -> str:
    """The numbers of the paper's row, if it has one."""
    names = [name for name in PUBLISHED[experiment.network] if experiment.title.startswith(name)]
    return ", ".join(_numbers(*PUBLISHED[experiment.network][name]) for name in names)


def _numbers(units: str, error: float, parameters: int) -> str:
    return f"{units}, {error:.1f}%, {parameters / 1000:.1f}k"


def _about(rows: Sequence[Row]) -> str:
    """A note on the lambdas, and on the precision of the latencies."""
    network = rows[0].experiment.network
    _, separate = NETWORKS[network].rows
    lams = ", ".join(f"{lam:g}" for lam in separate)
    origin = " (not the paper's, which are not published: chosen on held-out training images)"
    words = f"lambda sep. is ({lams})/N, one for each group{origin if network == 'mlp' else ''}."
    if rows[0].experiment.method == "dense":
        words += (
            " Faster than dense: each network was timed in turn with a dense one; what that says "
            "of the dense networks themselves, in the first row, is how far the measure is off."
        )
    return f"{words}\n"


def _others(network: str) -> str:
    published = PUBLISHED[network].items()
    others = (f"{name} {_numbers(*row)}" for name, row in published if not name.startswith("L0"))
    return f"Other methods in the paper's table: {'; '.join(others)}."


def _readouts(rows: Sequence[Row]) -> list[str]:
    header = ("method", *(f"{rule}: error, units" for rule in READOUTS))
    lines = []
    for row in rows:
        cells = [row.experiment.title]
        for rule in READOUTS:
            readouts = [result.readouts[rule] for result in row.results]
            units = zip(*(each["units"] for each in readouts), strict=True)
            middle = "-".join(f"{statistics.median(group):g}" for group in units)
            cells.append(f"{spread([each['error'] for each in readouts], '{:.2f}%')}, {middle}")
        lines.append(cells)
    return _table(header, lines)


def _tuning(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            row.experiment.title,
            spread([result.error for result in row.results], "{:.2f}%"),
            spread([result.tuned_error for result in row.results], "{:.2f}%"),
        ]
        for row in rows
    ]
    return _table(("method", "error", "after five epochs without gates"), lines)


def draw(rows: Sequence[Row], out: Path, name: str = "table1") -> tuple[Path, Path]:
    """Error against size, every seed, with the published points; and error over epochs."""
    from matplotlib.ticker import LogLocator

    def on(figure: "Figure") -> None:
        panels = figure.subplots(2, len(TITLES), squeeze=False)
        for (network, title), size, curve in zip(TITLES.items(), *panels, strict=True):
            rows_of_network = [row for row in rows if row.experiment.network == network]
            if not rows_of_network:
                continue
            styles = product((("o", "-"), ("s", "--")), _COLOURS)
            for row, ((point, line), colour) in zip(rows_of_network, styles, strict=False):
                results, label = row.results, row.experiment.title.replace("lambda", "λ")
                points = [r.small_parameters for r in results], [r.error for r in results]
                size.plot(*points, point, color=colour, label=label, alpha=0.7)
                for result in results:
                    epochs = [int(epoch) for epoch in result.curve]
                    curve.plot(epochs, [*result.curve.values()], line, color=colour, linewidth=0.8)
            published = [row[2] for row in PUBLISHED[network].values()]
            errors = [row[1] for row in PUBLISHED[network].values()]
            size.plot(published, errors, "x", color="black", label="published")
            for names, at in _named(network):
                words = {"textcoords": "offset points", "fontsize": 6, "rotation": 25}
                size.annotate(names.replace("lambda", "λ"), at, (2, 3), **words)
            size.set(xscale="log", xlabel="parameters of the compacted network", title=title)
            size.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            size.xaxis.set_major_formatter(lambda count, _: f"{count / 1000:g}k")
            size.xaxis.set_minor_formatter("")
            tested = "held-out" if rows[0].experiment.validate else "test"
            size.set_ylabel(f"{tested} error (%)")
            size.legend(fontsize=7)
            top = max(result.error for row in rows_of_network for result in row.results)
            curve.set(xscale="log", xlabel="epoch", ylim=(0, 2 * top))
            curve.set_ylabel(f"{tested} error of the averaged network (%)")

    return save_figure(on, out, name, (11, 8))


def _named(network: str) -> list[tuple[str, tuple[float, float]]]:
    """The published points and their names. Points that overlap share a label."""
    points: list[tuple[str, tuple[float, float]]] = []
    for name, (_, error, size) in sorted(PUBLISHED[network].items(), key=lambda row: row[1][1:]):
        if points and points[-1][1][1] == error and size < 1.1 * points[-1][1][0]:
            points[-1] = f"{name}\n{points[-1][0]}", points[-1][1]
        else:
            points.append((name, (size, error)))
    return points


_COLOURS = (PURPLE, GREEN, BLUE, VERMILION, ORANGE, "black")
