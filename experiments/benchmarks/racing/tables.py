"""What the results say: the choice of rates, tables, and one figure."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.racing.jobs import DENSE
from benchmarks.racing.methods import CELLS, METHODS
from benchmarks.racing.run import Line
from hardconcrete.report import BLUE, GREEN, ORANGE, PURPLE, VERMILION, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAME_EPOCHS = {"half": "scratch"}
"""Cells with as many epochs in all: networks from scratch stand in both."""

TITLES = {
    "none": "no training",
    "300": "a few hundred steps",
    "half": "half dense, half small",
    "scratch": "from scratch",
}
STYLES: dict[str, tuple[str, str, str]] = {
    "ours": (BLUE, "o", "-"),
    "ours-budget": (GREEN, "s", "-"),
    "ours-gates": (PURPLE, "D", "-"),
    "ours-scratch": (BLUE, "*", "-"),
    "tp-magnitude": (VERMILION, "^", "--"),
    "tp-taylor": (VERMILION, "v", "--"),
    "tp-magnitude-local": (ORANGE, "^", ":"),
    "tp-taylor-local": (ORANGE, "v", ":"),
    "tp-reg": (VERMILION, "P", "--"),
    "random": ("grey", "x", ":"),
    "narrow": ("black", "<", "--"),
    "same-widths": ("black", ">", ":"),
}
"""Colour, marker and line of each method."""


Settings = tuple[float, float]
"""The rate, and the strength of sparse training."""

Runs = dict[tuple[str, ...], dict[Settings, list[Line]]]
"""By network, data set, cell and method."""


def by_settings(lines: Iterable[Line]) -> Runs:
    """All runs, by what is tuned."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    for line in lines:
        where = tuple(line[name] for name in ("network", "dataset", "cell", "method"))
        runs[where][line["peak_lr"], line["regularization"]].append(line)
    return runs


def best(runs: dict[Settings, list[Line]]) -> Settings:
    """The settings with the least mean error, on the targets that all of them were run with."""
    shared = set.intersection(*({line["target"] for line in own} for own in runs.values()))

    def mean(settings: Settings) -> float:
        return _mean_error([line for line in runs[settings] if line["target"] in shared])

    return min(runs, key=mean) if shared else next(iter(runs))


def _mean_error(lines: list[Line]) -> float:
    return statistics.mean(line["error"] for line in lines)


def choose(lines: Iterable[Line], out: Path) -> None:
    """Write ``rates.json``: by network, cell and method the rate with the least held-out error."""
    tuned = [line for line in lines if line["validate"] and line["cell"] not in ("none", DENSE)]
    chosen: dict[str, Any] = {}
    for (network, _, cell, method), runs in sorted(by_settings(tuned).items()):
        rate, strength = best(runs)
        words = ", ".join(
            f"{r:g}: {_mean_error(own):.2f} ({len(own)} runs)" for (r, _), own in runs.items()
        )
        print(f"{network} {cell} {method}: {rate:g} of {words}")
        if len({len(own) for own in runs.values()}) > 1:
            print("  not all rates have the same number of runs")
        settings = {"peak_lr": rate, "regularization": strength}
        chosen.setdefault(network, {}).setdefault(cell, {})[method] = settings
    (out / "rates.json").write_text(json.dumps(chosen, indent=1) + "\n")


def cells(lines: list[Line]) -> Iterator[tuple[str, dict[str, dict[float, list[Line]]]]]:
    """Of one network and data set: each cell with its lines by method and target.

    Where several rates were tried, only the lines with the best one.
    """
    lines = [line for runs in by_settings(lines).values() for line in runs[best(runs)]]
    for cell in CELLS:
        also = SAME_EPOCHS.get(cell)
        rows = {method: defaultdict[float, list[Line]](list) for method in METHODS}
        for line in sorted(lines, key=lambda line: line["seed"]):
            if line["cell"] in (cell, also) and line["method"] != "dense":
                rows[line["method"]][line["target"]].append(line)
        yield cell, {method: by_target for method, by_target in rows.items() if by_target}


def tables(lines: list[Line]) -> None:
    """Print error, and the measured fraction of the MACs, by cell, method and target."""
    for dense in (DENSE, "scratch"):
        runs = [line for line in lines if line["cell"] == dense and line["method"] == "dense"]
        if runs:
            epochs = runs[0]["dense_epochs" if dense == DENSE else "epochs"]
            print(f"dense, {epochs} epochs: {_errors(runs)}")
    for cell, rows in cells(lines):
        targets = sorted({target for row in rows.values() for target in row}, reverse=True)
        if not targets:
            continue
        heads = "".join(f" {target:g} |" for target in targets)
        print(
            f"\n**{TITLES[cell]}** ({cell})\n\n| method |{heads}\n| --- |{' --- |' * len(targets)}"
        )
        for method, row in rows.items():
            print(f"| {method} |" + "".join(f" {_cell(row.get(t, []))} |" for t in targets))


def details(lines: list[Line]) -> None:
    """Print every measured column, as means of the seeds."""
    print("| cell | method | MACs | parameters | error | prune s | train s | latencies |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for cell, rows in cells(lines):
        for method, row in rows.items():
            for target, runs in sorted(row.items(), reverse=True):
                own = [line for line in runs if line["cell"] == cell]
                if own:
                    print(f"| {cell} | {method} {target:g} | {_details(own)} |")


def _details(runs: list[Line]) -> str:
    def mean(name: str) -> float:
        return statistics.mean(line[name] for line in runs)

    found = [line["latency"] for line in runs if line["latency"]]
    kinds = [kind for kind, value in (found[0] if found else {}).items() if isinstance(value, dict)]
    ratios = (f"{kind}: {statistics.mean(x[kind]['ratio'] for x in found):.2f}" for kind in kinds)
    return " | ".join(
        [
            f"{mean('macs_fraction'):.4f}",
            f"{mean('params_fraction'):.4f}",
            f"{mean('error'):.2f}",
            f"{mean('prune_seconds'):.1f}",
            f"{mean('train_seconds'):.0f}",
            ", ".join(ratios) or "not measured",
        ]
    )


def _cell(runs: list[Line]) -> str:
    return _errors(runs) if runs else "-"


def _errors(runs: list[Line]) -> str:
    errors = [line["error"] for line in runs]
    single = f" ({', '.join(f'{error:.2f}' for error in errors)})" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.2f}{single}"


def plot(lines: list[Line], out: Path) -> None:
    """Write the figure: error against multiply-adds, a panel for each cell, all methods."""
    panels = [(cell, rows) for cell, rows in cells(lines) if rows]
    used = [method for method in METHODS if any(method in rows for _, rows in panels)]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, (cell, rows) in zip(axes, panels, strict=True):
            for method, row in rows.items():
                _draw_method(ax, method, row)
            _draw_dense(ax, lines, DENSE if cell in ("none", "300") else "scratch")
            ax.set(title=TITLES[cell], xlabel="part of the dense MACs", xscale="log", yscale="log")
            ticks = sorted({target for row in rows.values() for target in row})
            ax.set_xticks(ticks, [f"{target:g}" for target in ticks], minor=False)
            ax.set_xticks([], minor=True)
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")
        axes[0].set_ylabel("error, %")
        handles = {}
        for ax in axes:
            found, labels = ax.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        order = [name for name in [*used, "dense"] if name in handles]
        figure.legend([handles[n] for n in order], order, loc="outside lower center", ncols=6)

    print(*save_figure(draw, out, "race", (4.0 * len(panels), 4.6)))


def _draw_method(ax: Any, method: str, row: dict[float, list[Line]]) -> None:
    colour, marker, line = STYLES[method]
    style = {"color": colour, "marker": marker}
    points = sorted(
        (
            statistics.mean(line["macs_fraction"] for line in runs),
            statistics.mean(line["error"] for line in runs),
        )
        for runs in row.values()
    )
    ax.plot(*zip(*points, strict=True), line, label=method, markersize=5, **style)
    single = [(x["macs_fraction"], x["error"]) for runs in row.values() for x in runs]
    ax.scatter(*zip(*single, strict=True), s=6, alpha=0.5, **style)


def _draw_dense(ax: Any, lines: list[Line], cell: str) -> None:
    runs = [line["error"] for line in lines if line["cell"] == cell and line["method"] == "dense"]
    if runs:
        ax.axhline(statistics.mean(runs), color="grey", linestyle=":", label="dense")
