"""Table 2 and figure 4: the runs on CIFAR, with the paper's numbers."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING

from hardconcrete.errors import DataError
from hardconcrete.report import COLOURS, Drawing, check_plotting, save_figure
from hardconcrete_paper.cifar.examination import CifarResult, read_run
from hardconcrete_paper.cifar.experiment import CifarExperiment
from hardconcrete_paper.mnist.table1 import spread
from hardconcrete_paper.training.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED = {
    ("resnet-110", "dense"): (6.43, 25.16),
    ("preact-110", "dense"): (6.37, None),
    ("wrn-28-10", "dense"): (4.00, 21.18),
    ("wrn-28-10", "dropout"): (3.89, 18.85),
    ("wrn-28-10", "l0 0.001"): (3.83, 18.75),
    ("wrn-28-10", "l0 0.002"): (3.93, 19.04),
}
"""Error in percent on CIFAR-10 and CIFAR-100, by network and setting, after 200 epochs."""

EPOCHS = 200
TICKS = 3.5, 4, 5, 6, 8, 10, 15, 20, 30, 50, 90
"""Ticks of the error axis, in percent."""
ROW_COLOURS = *COLOURS, "black", "saddlebrown", "deepskyblue", "crimson", "olive"
"""One for each row of the table; used again if there are more rows."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    experiment: CifarExperiment
    result: CifarResult
    folder: RunFolder

    @property
    def row(self) -> tuple[str, str]:
        """The row of the table it belongs to: its network and its setting."""
        one = self.experiment
        marks = [*["faithful"] * one.paper_gates, *["noise"] * one.noise]
        kinds = ("gates", one.gate_lr), ("warm-up", one.warmup), ("averaged from", one.swa)
        for mark, value in kinds:
            if value is not None:
                marks.append(f"{mark} {value:g}")
        marks += [f"shrink {one.shrink}"] * bool(one.shrink)
        variant = " ".join([one.variant, *one.labels[:1]])
        return one.network, ", ".join([variant, *one.labels[1:], *marks])


def finished(runs: Path) -> list[Run]:
    """All finished runs under a folder that were tested on the test set."""
    runs_at_end = []
    for path in sorted(runs.glob("*/record.json")):
        folder = RunFolder(path.parent)
        if "result" not in folder.read():  # not finished, or of table 1
            continue
        experiment, result = read_run(folder)
        if result and not experiment.validate:
            runs_at_end.append(Run(experiment, result, folder))
    return runs_at_end


def table2(runs: Path) -> str:
    """The table as Markdown: medians and spreads of the finished runs, and the number of seeds.

    Example:
        >>> try:
        ...     table2(Path("nowhere"))
        ... except DataError as error:
        ...     print(error)
        nowhere holds no finished run: train some with `hardconcrete-paper wrn`
    """
    finished_runs = _some(runs)
    lines = [
        "# Table 2",
        "",
        "Test error of the compacted network, averaged weights, last epoch; the paper's: medians "
        "of five runs.",
        "",
        "Faster: the dense network's time for a batch over the compacted one's, both measured; on "
        "a GPU replayed as a CUDA graph. Images a second while training; at last: after shrinking.",
        "",
        "| network | variant | data | epochs | n | error | MACs | expected | parameters | faster "
        "| images/s | paper |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    keys = dict.fromkeys(
        (run.row, run.experiment.dataset, run.experiment.epochs) for run in finished_runs
    )
    for row, dataset, epochs in keys:
        key = row, dataset, epochs
        alike = [
            r for r in finished_runs if (r.row, r.experiment.dataset, r.experiment.epochs) == key
        ]
        results = [run.result for run in alike]
        published = PUBLISHED.get(row) if epochs == EPOCHS else None
        paper = published[dataset == "cifar100"] if published else None
        cells = [
            *row,
            dataset,
            str(epochs),
            str(len(results)),
            spread([result.error for result in results], "{:.2f}%"),
            spread([100 * result.macs[0] / result.macs[1] for result in results], "{:.1f}%"),
            spread([100 * result.expected_macs / result.macs[1] for result in results], "{:.1f}%"),
            spread([100 * result.params[0] / result.params[1] for result in results], "{:.1f}%"),
            "; ".join(_faster(results)),
            _rates(alike),
            "" if paper is None else f"{paper:.2f}%",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rates(runs: Sequence[Run]) -> str:
    """Images a second over the whole training, and in epochs after the last shrink."""
    whole = statistics.median(run.result.images_per_second for run in runs)
    last = [rate for run in runs if (rate := _last_rate(run))]
    return f"{whole:,.0f}" + (f", at last {statistics.median(last):,.0f}" if last else "")


def _last_rate(run: Run) -> float | None:
    """None where nothing was removed while training."""
    lines = run.folder.lines()
    widths = [line.get("widths") for line in lines]
    if len(lines) < 2 or widths[0] == widths[-1]:
        return None
    images = run.result.images_per_second * run.result.seconds / run.experiment.epochs
    pairs = zip(lines[1:], lines[:-1], widths[:-1], strict=True)
    after = [b["seconds"] - a["seconds"] for b, a, before in pairs if before == widths[-1]]
    return images / statistics.median(after) if after else None


def _faster(results: Sequence[CifarResult]) -> Iterable[str]:
    for setting in dict.fromkeys(chain.from_iterable(result.latency for result in results)):
        times = [result.latency[setting] for result in results if setting in result.latency]
        ratio = statistics.median(dense / small for dense, small in times)
        yield f"{ratio:.2f}x ({setting})"


def figure4(runs: Path, out: Path) -> Drawing:
    """FLOPs over training on both data sets (a, b), test and training error (c, in two panels)."""
    check_plotting(out)
    wide_runs = [run for run in _some(runs) if run.experiment.network.startswith("wrn")]
    facts: dict[str, float] = {}

    rows = dict.fromkeys(run.row[1] for run in wide_runs)
    colours = dict(zip(rows, cycle(ROW_COLOURS), strict=False))

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 4)
        for axes, dataset in zip(panels, ("cifar10", "cifar100"), strict=False):
            runs_of_dataset = [run for run in wide_runs if run.experiment.dataset == dataset]
            facts.update(_flops(axes, runs_of_dataset, colours))
            axes.set(title=dataset, xlabel="epoch", ylim=(0, None))
            axes.set_ylabel("GFLOPs: expected (line), delivered (dots)")
        _errors(
            panels[2:], [run for run in wide_runs if run.experiment.dataset == "cifar10"], colours
        )
        for axes in panels:
            if not axes.lines:
                axes.text(0.5, 0.5, "no run yet", transform=axes.transAxes, ha="center")
        lines = [axes.get_legend_handles_labels() for axes in panels]
        named = {label: line for handles in lines for line, label in zip(*handles, strict=True)}
        figure.legend(named.values(), named, loc="outside lower center", ncols=4, fontsize=8)

    return Drawing(save_figure(draw, out, "figure4", (17, 4.6)), facts)


def _some(runs: Path) -> list[Run]:
    finished_runs = finished(runs)
    if not finished_runs:
        raise DataError(f"{runs} holds no finished run: train some with `hardconcrete-paper wrn`")
    return finished_runs


def _flops(axes: "Axes", runs: Sequence[Run], colours: Mapping[str, str]) -> dict[str, float]:
    """Draw FLOPs, two for each multiply-add. Networks without gates are a constant line."""
    facts = {}
    for macs in {run.result.macs[1] for run in runs}:
        axes.axhline(2e-9 * macs, color="lightgrey", linewidth=4, label="dense or dropout, counted")
        facts[f"{runs[0].experiment.dataset}, dense or dropout, counted"] = 2e-9 * macs
    for run in runs:
        lines, row = run.folder.lines(), run.row[1]
        if not lines:
            raise DataError(
                f"{run.folder.metrics} is missing or empty, and the figure needs what epochs cost; "
                "put it there, or move its folder away"
            )
        epochs = [line["epoch"] for line in lines]
        for kind, style in (("expected", "-"), ("delivered", ":")):
            values = [2e-9 * line[kind] for line in lines]
            axes.plot(epochs, values, style, color=colours[row], label=row if style == "-" else "")
            facts[f"{run.experiment.dataset}, {row}, {kind}, at the end"] = values[-1]
    return facts


def _errors(panels: Sequence["Axes"], runs: Sequence[Run], colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import NullFormatter

    for run in runs:
        for axes, curve in zip(panels, (run.result.curve, run.result.training_curve), strict=True):
            epochs = [int(epoch) for epoch in curve]
            axes.plot(epochs, [*curve.values()], color=colours[run.row[1]], linewidth=1)
    test, training = panels
    test.set(title="cifar10, test images", xlabel="epoch", ylabel="error (%)")
    test.set_yscale("log")
    seen = test.get_ylim()
    test.set_yticks(TICKS, [str(tick) for tick in TICKS])
    test.set_ylim(seen)
    test.yaxis.set_minor_formatter(NullFormatter())
    training.set(title="cifar10, training images", xlabel="epoch", ylabel="error (%)")
    training.set_yscale("symlog", linthresh=0.01)  # a scale with a place for zero
    training.set_ylim(0, None)
