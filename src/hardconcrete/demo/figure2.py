"""Figure 2 of the paper: one gate, drawn from the distributions themselves."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import RelaxedBernoulli

import hardconcrete as hc
from hardconcrete.report import BLUE, VERMILION, Drawing, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure2(out: Path, *, samples: int = 10_000, seed: int = 0) -> Drawing:
    """Figure 2: the binary and the hard concrete (a), and their means over log alpha (b).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     drawing = figure2(Path(folder), samples=100)
        >>> round(drawing.facts["mass on {0, 1}"], 2)
        0.46
    """
    gate = hc.HardConcrete(0.0, temperature=0.5)
    log_alpha = torch.linspace(-6, 6, 121)
    gates = hc.HardConcrete(log_alpha, temperature=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hard_average = gates.sample((samples,)).mean(0)
        soft_average = _concrete(log_alpha).sample((samples,)).mean(0)

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        _draw_densities(left, gate)
        _draw_means(right, log_alpha, gates, soft_average, hard_average)
        right.set_title(f"(b) the noise smooths the gate ({samples:,} samples)")

    closed, saturated = gate.closed_probability, gate.log_prob(torch.tensor(1.0)).exp()
    facts = {
        "mass at exactly 0": closed.item(),
        "mass at exactly 1": saturated.item(),
        "mass on {0, 1}": (closed + saturated).item(),
        "mass between": (gate.open_probability - saturated).item(),
        "mean": gate.mean.item(),
        "standard deviation": gate.stddev.item(),
        "largest |average - exact mean| in (b)": (hard_average - gates.mean).abs().max().item(),
    }
    return Drawing(save_figure(draw, out, "figure2", (11, 4.2)), facts)


def _concrete(log_alpha: Tensor) -> RelaxedBernoulli:
    """The binary concrete of the figure, from torch (eqs. 23 and 24)."""
    return RelaxedBernoulli(torch.tensor(0.5), logits=log_alpha)


def _draw_means(
    axes: "Axes", log_alpha: Tensor, gates: hc.HardConcrete, soft: Tensor, hard: Tensor
) -> None:
    """Means of samples of both concretes over log alpha, and their values without noise."""
    axes.plot(log_alpha, soft, "-", color=BLUE, label="binary concrete, mean")
    axes.plot(log_alpha, hard, "-", color=VERMILION, label="hard concrete, mean")
    noiseless = torch.sigmoid(log_alpha / 0.5)
    axes.plot(log_alpha, noiseless, "--", color=BLUE, label="binary concrete, no noise")
    noiseless = gates.readout("median")
    axes.plot(log_alpha, noiseless, "--", color=VERMILION, label="hard concrete, no noise")
    axes.plot(log_alpha[::5], gates.mean[::5], "k.", label="hard concrete, exact mean")
    axes.set(xlabel="location $\\log\\,\\alpha$", ylabel="value of the gate")
    axes.legend(loc="upper left", fontsize=8)


def _draw_densities(axes: "Axes", gate: hc.HardConcrete) -> None:
    """The density of the concrete, and the three parts of the hard concrete (eq. 26)."""
    s = torch.linspace(0.002, 0.998, 800)
    soft = _concrete(torch.zeros(())).log_prob(s).exp()
    axes.plot(s, soft, "-", color=BLUE, label="binary concrete, density")
    axes.plot(s, gate.log_prob(s).exp(), "-", color=VERMILION, label="hard concrete, density")
    axes.set(xlabel="value of the gate $z$", ylabel="density", ylim=(0, 4), xlim=(-0.06, 1.06))
    masses = axes.twinx()
    ends = torch.tensor([0.0, 1.0])
    mass = gate.log_prob(ends).exp()
    masses.vlines(ends, 0, mass, color=VERMILION, linewidth=5, alpha=0.6)
    masses.plot(ends, mass, "^", color=VERMILION, label="hard concrete, mass at 0 and 1")
    for end, value, align in zip(ends.tolist(), mass.tolist(), ("left", "right"), strict=True):
        masses.text(end + 0.05 - 0.1 * end, value, f"{value:.3f}", ha=align, color=VERMILION)
    masses.set(ylabel="probability mass", ylim=(0, 0.4))
    masses.spines["right"].set_visible(True)
    axes.set_title("(a) $\\log\\,\\alpha = 0$, $\\beta = 0.5$, stretched to $(-0.1, 1.1)$")
    handles = [*axes.get_legend_handles_labels()[0], *masses.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper center", fontsize=8)
