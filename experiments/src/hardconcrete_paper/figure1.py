"""Figure 1 of the paper: penalties of one parameter."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hardconcrete.report import BLUE, GREEN, PURPLE, VERMILION, Drawing, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure1(out: Path) -> Drawing:
    """Figure 1: L_p penalties of one parameter; only p = 0 does not shrink large values.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     drawing = figure1(Path(folder))
        >>> [file.name for file in drawing.files]
        ['figure1.svg', 'figure1.png']
    """
    theta = torch.linspace(-2, 2, 801)
    styles = {2.0: (BLUE, "-"), 1.0: (VERMILION, "--"), 0.5: (GREEN, "-."), 0.25: (PURPLE, ":")}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for p, (colour, line) in styles.items():
            axes.plot(theta, theta.abs() ** p, line, color=colour, label=f"$p = {p:g}$")
        axes.plot([-2, 2], [1, 1], "-", color="black", label="$p = 0$: constant for $θ ≠ 0$")
        axes.plot(0, 1, "o", color="black", markerfacecolor="white")
        axes.plot(0, 0, "o", color="black")
        axes.set(xlabel="$θ$", ylabel="$|θ|^p$", ylim=(-0.05, 2.05))
        axes.set_title("$L_p$ penalties of one parameter")
        axes.legend(loc="upper center")

    penalty_at_two = {f"penalty of theta = 2 at p = {p:g}": 2.0**p for p in [*styles, 0.0]}
    return Drawing(save_figure(draw, out, "figure1", (6, 4)), penalty_at_two)
