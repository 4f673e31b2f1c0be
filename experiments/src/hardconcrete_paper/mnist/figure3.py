"""Figure 3: what training would cost if closed gates cost nothing, over its epochs."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hardconcrete.errors import DataError
from hardconcrete.report import BLUE, GREEN, VERMILION, Drawing, save_figure
from hardconcrete_paper.mnist.experiment import NETWORKS, with_gates
from hardconcrete_paper.mnist.table1 import TITLES, Row
from hardconcrete_paper.training.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {
    "uncoupled": ("expected, as the paper counts (uncoupled)", "--"),
    "expected": ("expected, both ends of a weight alive (coupled)", "-"),
    "delivered": ("delivered by the readout", ":"),
}


def figure3(rows: Sequence[Row], runs: Path, out: Path) -> Drawing:
    """Expected and delivered FLOPs over training, of what ``table1`` trained."""
    facts: dict[str, float] = {}

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, len(TITLES))
        for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
            rows_of_network = [row for row in rows if row.experiment.network == name]
            facts.update(_panel(axes, name, rows_of_network, runs))
            axes.set(title=title, xlabel="epoch", ylim=(0, None))
            axes.set_ylabel("MFLOPs per image (one multiply-add is two)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)

    return Drawing(save_figure(draw, out, "figure3", (11, 5.2)), facts)


def _panel(axes: "Axes", name: str, rows: Sequence[Row], runs: Path) -> dict[str, float]:
    network = NETWORKS[name]
    dense = 2 * network.dense_macs
    kept = {
        site: torch.full((size,), 1 - network.droprate[site])
        for site, size in network.sizes.items()
    }
    facts = {f"{name}, dense": dense / 1e6}
    axes.axhline(dense / 1e6, color="black", label="dense")
    gated = with_gates(network, torch.device("cpu"))
    coupled = gated.ledger.cost(torch.cat([*kept.values()]))[1].item()
    for kind, macs in (("uncoupled", network.uncoupled(kept)), ("expected", coupled)):
        value, (words, style) = 2 * macs / 1e6, KINDS[kind]
        axes.axhline(value, color=GREEN, linestyle=style, label=f"dropout, {words}")
        facts[f"{name}, dropout, {kind}"] = value
    trained = [row for row in rows if row.experiment.method == "l0" and not row.experiment.quirks]
    for row, colour in zip(trained, (BLUE, VERMILION), strict=True):
        folder = RunFolder(runs / row.experiment.name)
        lines = folder.lines()
        if not lines:
            raise DataError(f"{folder.metrics} is missing or empty: it has the epochs to be drawn")
        epochs = sorted({line["epoch"] for line in lines})
        for kind, (words, style) in KINDS.items():
            values = [
                2e-6 * statistics.median(line[kind] for line in lines if line["epoch"] == epoch)
                for epoch in epochs
            ]
            label = f"{row.experiment.title.replace('lambda', 'λ')}, {words}"
            axes.plot(epochs, values, style, color=colour, label=label)
            facts[f"{name}, {row.experiment.title}, {kind} at the end"] = values[-1]
    return facts
