"""Claim: a seed moves the error of a row of table 1 by about 0.1 points, as far as its bound lies.

Reads the records of rows that were trained with many seeds, and writes of each the mean, the
deviation between networks and how many of them keep the bounds that were set for it; draws every
network beside the paper's. The rows:

    hardconcrete-paper lenet5 --lam 10 0.5 0.1 10 --seeds $(seq 0 19) --out RUNS

and so on; each takes three (MLP) or five (LeNet-5) minutes on an H200. Then

    python experiments/benchmarks/seeds.py [RUNS/*/record.json]
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hardconcrete.report import BLUE, VERMILION, save_figure
from hardconcrete_paper.mnist.experiment import NETWORKS

RESULTS = Path(__file__).parents[2] / "results"
BOUNDS = {
    ("mlp", (0.1,)): (((199, 239), (194, 234), (100, 100)), 1.6),
    ("mlp", (0.1, 0.5, 5.0)): (((236, 296), (76, 100), (25, 41)), 1.9),
    ("lenet5", (0.1,)): (((0, 20), (0, 32), (0, 60), (0, 480)), 0.95),
    ("lenet5", (10.0, 0.5, 0.1, 10.0)): (((0, 12), (0, 20), (0, 70), (0, 30)), 1.1),
}
"""Units of every group, from and to, and the error in percent: what was asked of seeds 0 to 2."""

COLUMNS = (
    "row",
    "units, mean",
    "error, mean",
    "deviation",
    "range",
    "at its best epoch by the test set, mean",
    "no more than the paper's",
    "units within bounds",
    "error within",
    "both",
    "disagreements of compacted networks",
)


class Row:
    """A row with its networks, and the bounds on them."""

    def __init__(self, record: dict[str, Any]) -> None:
        settings, self.networks = record["settings"], record["results"]
        network, lam = settings["network"], tuple(settings["lam"])
        title, _, published = NETWORKS[network].rows[lam]
        decay = settings["weight_decay"]
        self.published = None if decay else published
        self.title = f"{network}, {title}" + f", weight decay {decay:g}" * bool(decay)
        self.units, self.error = BOUNDS[network, lam]
        self.errors = [one["error"] for one in self.networks]
        self.place = ([*BOUNDS].index((network, lam)), decay)

    def line(self) -> str:
        """A line of the table."""
        each = [*zip(*(one["units"] for one in self.networks), strict=True)]
        small = [self._small(one["units"]) for one in self.networks]
        right = [error <= self.error for error in self.errors]
        both = [*map(all, zip(small, right, strict=True))]
        cells = [
            self.title,
            "-".join(f"{statistics.mean(units):.1f}" for units in each),
            f"{statistics.mean(self.errors):.3f}%",
            f"{statistics.stdev(self.errors):.2f}",
            f"{min(self.errors):.2f} to {max(self.errors):.2f}",
            f"{statistics.mean(min(one['curve'].values()) for one in self.networks):.3f}%",
            "" if self.published is None else _count(e <= self.published for e in self.errors),
            *map(_count, (small, right, both)),
            str(sum(one["disagreements"] for one in self.networks)),
        ]
        return f"| {' | '.join(cells)} |"

    def _small(self, units: list[int]) -> bool:
        return all(low <= n <= high for n, (low, high) in zip(units, self.units, strict=True))


def _count(these: Iterable[bool]) -> str:
    each = [*these]
    return f"{sum(each)} of {len(each)}"


def draw(rows: list[Row], out: Path) -> None:
    """Every network's error, a line per row."""

    def on(figure: Any) -> None:
        axes, lines = figure.subplots(), range(len(rows))
        errors = [(error, y) for y, row in enumerate(rows) for error in row.errors]
        dots = {"color": BLUE, "alpha": 0.4, "mec": "none", "label": "a network"}
        axes.plot(*zip(*errors, strict=True), "o", **dots)
        means = [statistics.mean(row.errors) for row in rows]
        axes.plot(means, lines, "|", color=BLUE, ms=18, mew=2, label="mean")
        published, bounds = [row.published for row in rows], [row.error for row in rows]
        axes.plot(published, lines, "x", color=VERMILION, ms=9, mew=2, label="the paper's")
        axes.plot(bounds, lines, "|", color="black", ms=18, mew=1, label="bound")
        axes.set_yticks(lines, [row.title for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel="test error, %")
        figure.legend(loc="outside upper center", ncols=4)

    save_figure(on, out, "seeds", (7.5, 3.2))


def main() -> None:
    """Write the table and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="*", help="default: results/seeds/*")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of table and picture")
    given = parser.parse_args()
    files = given.records or sorted((RESULTS / "seeds").glob("*.json"))
    rows = [Row(json.loads(file.read_text())) for file in files]
    rows.sort(key=lambda row: row.place)
    head = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    table = "\n".join([*head, *(row.line() for row in rows)])
    print(table)
    draw(rows, given.out)
    (given.out / "seeds.md").write_text(table + "\n")


if __name__ == "__main__":
    main()
