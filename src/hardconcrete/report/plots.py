"""Plots of gates, of importance and of training, as SVG and PNG."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hardconcrete.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for colour-blind readers.
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE)
LINES = ("-", "--", "-.", ":")

STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 150,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "hardconcrete",
}


@dataclass(frozen=True)
class Drawing:
    """A drawn figure: its files, and the numbers that a reader can check in it."""

    files: tuple[Path, ...]
    facts: dict[str, float]


def save_figure(
    draw: Callable[["Figure"], None], out: Path, name: str, size: tuple[float, float]
) -> tuple[Path, Path]:
    """Draw a figure and write it as SVG and PNG, with the same bytes in every run.

    Args:
        draw: draws on an empty figure.
        out: the folder.
        name: of both files, without a suffix.
        size: width and height in inches.


    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> [file.name for file in save_figure(lambda f: f.text(0, 0, "x"), folder, "a", (1, 1))]
        ['a.svg', 'a.png']
    """
    check_plotting(out)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    files = (out / f"{name}.svg", out / f"{name}.png")
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(files[0], metadata={"Date": None})
        figure.savefig(files[1])
    return files


def check_plotting(out: Path) -> None:
    """Refuse early, before long work, if matplotlib is missing or ``out`` is not a folder."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="plot") from error
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"--out {out} is a file; name a folder for the pictures")
    out.mkdir(parents=True, exist_ok=True)


def kept_inputs(values: Tensor, shape: tuple[int, int], out: Path) -> tuple[Path, Path]:
    """Plot the gates of the input pixels: which are kept, and their values.

    Example:
        >>> import tempfile, torch
        >>> _ = kept_inputs(torch.ones(4), (2, 2), Path(tempfile.mkdtemp()))
    """
    picture = values.detach().cpu().view(shape).numpy()

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        image = axes.imshow(picture, cmap="viridis", vmin=0, vmax=1)
        kept = int((picture > 0).sum())
        axes.set_title(f"{kept} of {picture.size} input pixels are kept")
        axes.set(xticks=[], yticks=[])
        figure.colorbar(image, label="value of the gate", shrink=0.8)

    return save_figure(draw, out, "pixels", (5, 4.2))


def gate_histograms(probabilities: Mapping[str, Tensor], out: Path) -> tuple[Path, Path]:
    """Plot a histogram of the probabilities to be open, for each group.

    Example:
        >>> import tempfile, torch
        >>> _ = gate_histograms({"fc1:in": torch.rand(10)}, Path(tempfile.mkdtemp()))
    """
    bins = torch.linspace(0, 1, 26).tolist()

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, len(probabilities), squeeze=False)[0]
        groups = zip(panels, probabilities.items(), COLOURS * len(panels), strict=False)
        for axes, (name, values), colour in groups:
            axes.hist(values.detach().cpu().tolist(), bins=bins, color=colour)
            axes.set(xlabel="probability of being open", title=f"{name} ({len(values)} gates)")
        panels[0].set_ylabel("gates")

    return save_figure(draw, out, "gates", (3.6 * len(probabilities), 3.2))


def importance_curves(values: Mapping[str, Tensor], out: Path) -> tuple[Path, Path]:
    """Plot the importance of the units of each group, the most important first.

    Example:
        >>> import tempfile
        >>> _ = importance_curves({"fc1": torch.tensor([3.0, 1.0, 0.0])}, Path(tempfile.mkdtemp()))
    """

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, (name, units) in enumerate(values.items()):
            ranked = units.detach().cpu().sort(descending=True).values
            heights = ranked.clamp(min=MIN_DRAWN_FRACTION * float(ranked[0])).tolist()
            places = [100 * (k + 0.5) / len(heights) for k in range(len(heights))]
            style, colour = LINES[index // 5 % 4], COLOURS[index % 5]
            axes.plot(places, heights, style, color=colour, label=name)
        axes.set(xlabel="units of the group (%)", ylabel="importance", yscale="log")
        axes.set_title("Importance of the units for the loss")
        if len(values) <= MAX_LEGEND_ENTRIES:
            axes.legend(fontsize=6)

    return save_figure(draw, out, "importance", (6, 4))


MIN_DRAWN_FRACTION = 1e-8
"""Smaller fractions of a group's largest value are drawn at this height: 0 has no logarithm."""

MAX_LEGEND_ENTRIES = 20
"""With more lines there is no legend, because their colours would repeat."""


def units_over_time(history: Mapping[str, Sequence[int]], out: Path) -> tuple[Path, Path]:
    """Plot the percentage of units that are left after each epoch, for each group.

    Example:
        >>> import tempfile
        >>> _ = units_over_time({"fc1:in": [784, 700, 300]}, Path(tempfile.mkdtemp()))
    """

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, (name, counts) in enumerate(history.items()):
            shares = [100 * count / counts[0] for count in counts]
            label = f"{name}: {counts[-1]} of {counts[0]}"
            axes.plot(
                range(len(counts)), shares, LINES[index % 4], color=COLOURS[index % 5], label=label
            )
        axes.set(xlabel="epoch", ylabel="units left (%)", ylim=(0, 105))
        axes.set_title("Units that the network still uses")
        axes.legend(loc="best")

    return save_figure(draw, out, "units", (6, 4))
