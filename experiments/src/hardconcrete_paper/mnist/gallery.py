"""A page of pictures: pixels, gates and filters of the networks of table 1, over their training."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hardconcrete as hc
from hardconcrete.errors import DataError
from hardconcrete.report import COLOURS, check_plotting, save_figure
from hardconcrete_paper.mnist.experiment import NETWORKS, MnistExperiment
from hardconcrete_paper.training.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Snapshots = dict[int, dict[str, Tensor]]

PAGE = """# Gallery

What the gates of table 1's networks did in {epochs} epochs, drawn from saved networks by
`hardconcrete-paper gallery`. These, of seed {seed}, end with {left}
units.

## Which pixels the MLP reads

![Gates of the 784 input pixels of the MLP at several epochs](gallery/pixels.png)

Black pixels are closed. The border, which is blank in almost every image, closes first, because
only the penalty moves its gates.

## How gates decide

![Probability of being open of every gate over the epochs, by group](gallery/trajectories.png)

Each line is one gate of the LeNet-5 whose lambdas differ by layer. Hidden units of the last layer
drift together at first; then those that the loss needs open again. In other groups the gates that
stay open rise from the beginning.

## Which filters of LeNet-5 survive

![The 20 filters of the first convolution, with the value of their gates](gallery/filters.png)

The 5 x 5 filters of the first convolution under lambda = 0.1/N (above) and lambda sep. (below),
times their gates. Crossed filters are closed, and are not in the compacted network.
"""


def gallery(runs: Path, out: Path, seed: int = 0) -> tuple[Path, ...]:
    """Draw the pictures from the runs of ``table1`` into ``out/gallery``, and write the page."""
    check_plotting(out)
    mlp, (uniform, separate) = [*NETWORKS["mlp"].rows], [*NETWORKS["lenet5"].rows]
    pixels = _snapshots(runs, MnistExperiment("mlp", mlp[0]), seed)
    lenets = [_snapshots(runs, MnistExperiment("lenet5", lam), seed) for lam in (uniform, separate)]
    pictures = out / "gallery"
    files = (
        *_pixels(pixels, pictures),
        *_trajectories(lenets[1], pictures),
        *_filters([snapshots[max(snapshots)] for snapshots in lenets], pictures),
    )
    page = out / "gallery.md"
    ends = [("mlp", pixels), *(("lenet5", each) for each in lenets)]
    left = ", ".join(_left(network, snapshots[max(snapshots)]) for network, snapshots in ends)
    page.write_text(PAGE.format(epochs=max(pixels), seed=seed, left=left))
    return page, *files


def _snapshots(runs: Path, experiment: MnistExperiment, seed: int) -> Snapshots:
    snapshots = dict(RunFolder(runs / experiment.name).snapshots(seed))
    if not snapshots:
        raise DataError(
            f"{runs / experiment.name} holds no networks of seed {seed}: "
            "train them with `hardconcrete-paper table1`"
        )
    return snapshots


def _gates(network: str, state: Mapping[str, Tensor]) -> dict[str, hc.HardConcrete]:
    """The gates of a saved network, by group."""
    sizes = NETWORKS[network].sizes
    parts = state["gates.log_alpha"].split([*sizes.values()])
    return {name: hc.HardConcrete(part) for name, part in zip(sizes, parts, strict=True)}


def _left(network: str, state: Mapping[str, Tensor]) -> str:
    """The units that its readout leaves."""
    gates = _gates(network, state).values()
    return "-".join(str(int((own.readout("paper") > 0).sum())) for own in gates)


def _pixels(snapshots: Snapshots, out: Path) -> tuple[Path, Path]:
    last = max(snapshots)
    wanted = [last * share / 200 for share in (1, 5, 10, 20, 40, 80, 120, 200)]
    chosen = sorted({min(snapshots, key=lambda epoch: abs(epoch - want)) for want in wanted})

    def draw(figure: "Figure") -> None:
        columns = math.ceil(len(chosen) / 2)
        panels = figure.subplots(2, columns, squeeze=False).flatten()
        for axes in panels:
            axes.set_axis_off()
        for axes, epoch in zip(panels, chosen, strict=False):
            values = _gates("mlp", snapshots[epoch])["fc1:in"].readout("paper")
            axes.imshow(values.view(28, 28).numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set_title(f"epoch {epoch}: {int((values > 0).sum())} pixels", fontsize=9)

    return save_figure(draw, out, "pixels", (9, 4.8))


def _trajectories(snapshots: Snapshots, out: Path) -> tuple[Path, Path]:
    epochs = sorted(snapshots)
    over_time = [_gates("lenet5", snapshots[epoch]) for epoch in epochs]

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, len(over_time[0]), sharey=True)
        for axes, name, colour in zip(panels, over_time[0], COLOURS, strict=False):
            lines = torch.stack([gates[name].open_probability for gates in over_time])
            axes.plot(
                epochs, lines.numpy(), color=colour, alpha=0.35, linewidth=0.7, rasterized=True
            )
            axes.set(title=f"{name} ({lines.shape[1]} gates)", xlabel="epoch", xscale="log")
        panels[0].set_ylabel("probability of being open")

    return save_figure(draw, out, "trajectories", (12, 3.4))


def _filters(states: list[dict[str, Tensor]], out: Path) -> tuple[Path, Path]:
    def draw(figure: "Figure") -> None:
        panels = figure.subplots(2 * len(states), 10)
        for index, state in enumerate(states):
            gates = _gates("lenet5", state)["conv1:out"].readout("paper")
            filters = state["model.conv1.weight"][:, 0] * gates[:, None, None]
            scale = filters.abs().max().item() or 1.0
            for axes, picture, gate in zip(
                panels[2 * index : 2 * index + 2].flatten(), filters, gates, strict=True
            ):
                axes.imshow(picture.numpy(), cmap="RdBu", vmin=-scale, vmax=scale)
                axes.set(xticks=[], yticks=[])
                axes.set_title(f"{gate.item():.2f}", fontsize=7)
                if gate == 0:
                    axes.plot([0, 4], [0, 4], "k-", [0, 4], [4, 0], "k-", linewidth=1)

    return save_figure(draw, out, "filters", (9, 1.9 * len(states)))
