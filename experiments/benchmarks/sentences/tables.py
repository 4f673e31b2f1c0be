"""The lines of results, and their table: accuracy by method, size and steps."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Line = dict[str, Any]


def read_lines(file: Path, seed: int | None = None) -> list[Line]:
    """The lines of a file, of one seed or of all; none without the file."""
    if not file.exists():
        return []
    lines = map(json.loads, file.read_text().splitlines())
    return [line for line in lines if seed is None or line["seed"] == seed]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for one value."""
    return float(stdev(values) / len(values) ** 0.5) if len(values) > 1 else 0.0


def table(lines: Sequence[Line]) -> str:
    """The mean over seeds with its standard error, and each seed.

    Example:
        >>> line = {"method": "dense", "size": 1.0, "steps": 0, "distill": False, "seed": 0}
        >>> print(table([line | {"accuracy": 80.0}, line | {"accuracy": 82.0, "seed": 1}]))
        | method | MACs | steps | accuracy | seeds |
        | --- | --- | --- | --- | --- |
        | dense | 100% | 0 | 81.0 ± 1.0 | 80.0, 82.0 |
    """
    rows = ["| method | MACs | steps | accuracy | seeds |", "| --- | --- | --- | --- | --- |"]
    cells: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        cells[line["method"], line["size"], line["steps"], line["distill"]].append(line)
    for (method, size, steps, distill), own in sorted(cells.items(), key=_order):
        values = [line["accuracy"] for line in sorted(own, key=lambda line: line["seed"])]
        words = f"{steps}, distilled" if distill else str(steps)
        figures = f"{mean(values):.1f} ± {standard_error(values):.1f}"
        each = ", ".join(f"{value:.1f}" for value in values)
        rows.append(f"| {method} | {size:.0%} | {words} | {figures} | {each} |")
    return "\n".join(rows)


def _order(cell: tuple[tuple[Any, ...], list[Line]]) -> tuple[Any, ...]:
    """Large sizes first, then few steps, then the best."""
    (_, size, steps, distill), lines = cell
    return -size, steps, distill, -mean(line["accuracy"] for line in lines)
