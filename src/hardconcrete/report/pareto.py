"""Many sizes of one trained model: units ranked by their gates, error against cost and latency."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hardconcrete.compaction import compact
from hardconcrete.cost import count
from hardconcrete.cost.timing import interleaved, quartiles, wait_for
from hardconcrete.errors import ArgumentError, HardConcreteWarning
from hardconcrete.gating import GatedModel
from hardconcrete.objective import Budget, recalibrate
from hardconcrete.report.plots import BLUE, VERMILION, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One size of a model.

    Args:
        fraction: the budget, as a part of the dense multiply-adds.
        macs: multiply-adds for the example inputs.
        params: parameters.
        error: what ``evaluate`` said of it.
        ms: milliseconds of one call with the example inputs, the median; None if not measured.
    """

    fraction: float
    macs: int
    params: int
    error: float
    ms: float | None = None


@dataclass(frozen=True)
class Pareto:
    """Sizes of a model with their errors, in the order of the fractions given."""

    points: tuple[Point, ...]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __str__(self) -> str:
        lines = [f"{'budget':>8}{'MACs':>16}{'parameters':>14}{'error':>10}{'ms':>10}"]
        for p in self.points:
            ms = "" if p.ms is None else f"{p.ms:.3f}"
            lines.append(f"{p.fraction:>8.1%}{p.macs:>16,}{p.params:>14,}{p.error:>10.4g}{ms:>10}")
        return "\n".join(lines)

    def plot(self, out: Path | str) -> tuple[Path, Path]:
        """Write the error against multiply-adds, and against latency where measured."""
        points = sorted(self.points, key=lambda point: point.macs)
        errors = [point.error for point in points]
        columns = [("multiply-adds", [float(point.macs) for point in points], BLUE)]
        times = [point.ms for point in points if point.ms is not None]
        if len(times) == len(points):
            columns.append(("milliseconds", times, VERMILION))

        def draw(figure: "Figure") -> None:
            panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
            for axes, (name, values, colour) in zip(panels, columns, strict=True):
                axes.plot(values, errors, "o-", color=colour)
                axes.set(xlabel=name, xscale="log")
            panels[0].set_ylabel("error")

        return save(draw, Path(out), "pareto", (4.5 * len(columns), 3.4))


def pareto(
    gated: GatedModel,
    fractions: Sequence[float],
    evaluate: Callable[[nn.Module], float],
    *,
    batches: Iterable[Any] = (),
    round_to: int = 1,
    repeats: int = 20,
) -> Pareto:
    """Cut one trained model to many sizes, without training again.

    Args:
        gated: a trained model; it is left as it is.
        fractions: budgets, as parts of the dense multiply-adds. Each is met as
            ``compact(gated, budget=...)`` does, by the ranking of the gates.
        evaluate: the error of a small model, which is in evaluation mode.
        batches: inputs to estimate batch norms anew with, see ``recalibrate``.
        round_to: widths are multiples of this.
        repeats: calls that are timed; 0 for none.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 2)
        >>> gated = hc.attach_gates(torch.nn.Sequential(*layers), torch.zeros(2, 4))
        >>> x = torch.randn(8, 4)
        >>> curve = hc.pareto(gated, [0.5, 1.0], lambda small: small(x).square().mean().item())
        >>> [point.macs for point in curve]
        [48, 108]
    """
    if not isinstance(fractions, Iterable) or not (fractions := [*fractions]):
        raise ArgumentError("pareto needs fractions of the dense multiply-adds, in a list")
    if repeats < 0 or repeats == 1:
        raise ArgumentError(f"repeats={repeats} must be 0, or at least 2")
    budgets = [Budget(gated, macs=_fraction(fraction), by="gates") for fraction in fractions]
    known = list(batches)
    models = []
    for budget in budgets:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HardConcreteWarning)  # as ranked: that is meant
            small = compact(gated, budget=budget, round_to=round_to)
        if known:
            recalibrate(small, known)
        models.append(small.eval())
    times = _medians(models, gated, repeats) if repeats else [None] * len(models)
    points = []
    for fraction, small, ms in zip(fractions, models, times, strict=True):
        found = count(small, *gated.example)
        with torch.no_grad():
            error = float(evaluate(small))
        points.append(Point(float(fraction), found.macs, found.params, error, ms))
    return Pareto(tuple(points))


def _fraction(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{given!r} is no fraction of the dense multiply-adds") from error


def _medians(models: Sequence[nn.Module], gated: GatedModel, repeats: int) -> list[float]:
    """Milliseconds of each, called in turn."""
    args, kwargs = gated.example
    calls = [partial(model, *args, **kwargs) for model in models]
    wait = partial(wait_for, [gated.gates.log_alpha.device])
    with torch.inference_mode():
        return [quartiles(times)[0] for times in interleaved(calls, repeats, wait)]
