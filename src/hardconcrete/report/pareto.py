"""``pareto``: the error of one trained model at several sizes, as a table and a plot.

This is a report because it counts, times and plots. ``pruning.sizes`` makes the small models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardconcrete.arguments import refuse_no_count
from hardconcrete.cost import KINDS, count
from hardconcrete.cost.latency.timing import interleaved, quartiles, wait_for
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel
from hardconcrete.graph.model_state import random_state_kept
from hardconcrete.importance.batches import Loss
from hardconcrete.importance.score import DEFAULT_EXAMPLES
from hardconcrete.pruning.prune import PruningRequest
from hardconcrete.pruning.sizes import prune_to_sizes, start_pruning
from hardconcrete.report.plots import BLUE, VERMILION, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One size of a model.

    Args:
        fraction: the budget, as a fraction of the dense cost.
        macs: multiply-adds for the example inputs.
        params: parameters.
        error: the value of ``evaluate``.
        ms: the median milliseconds of a call with the example inputs; None if not timed.
        kv_bytes: bytes of keys and values per token; 0 without attention.
    """

    fraction: float
    macs: int
    params: int
    error: float
    ms: float | None = None
    kv_bytes: int | None = 0


@dataclass(frozen=True)
class Pareto:
    """Sizes of a model with their errors, in the order of the fractions."""

    points: tuple[Point, ...]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __str__(self) -> str:
        attends = any(p.kv_bytes for p in self.points)
        lines = [f"{'budget':>8}{'MACs':>16}{'parameters':>14}{'error':>10}{'ms':>10}"]
        lines[0] += f"{'KV bytes':>10}" if attends else ""
        for p in self.points:
            ms = "" if p.ms is None else f"{p.ms:.3f}"
            line = f"{p.fraction:>8.1%}{p.macs:>16,}{p.params:>14,}{p.error:>10.4g}{ms:>10}"
            lines.append(line + (f"{p.kv_bytes:>10,}" if attends else ""))
        return "\n".join(lines)

    def plot(self, out: Path | str) -> tuple[Path, Path]:
        """Plot the error against multiply-adds, and against latency if it was timed.

        Args:
            out: a folder for ``pareto.svg`` and ``pareto.png``.
        """
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

        return save_figure(draw, Path(out), "pareto", (4.5 * len(columns), 3.4))


def pareto(
    model: nn.Module,
    example_inputs: Any,
    batches: Iterable[Any],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    *,
    fractions: Sequence[float],
    cost: str = "macs",
    evaluate: Callable[[nn.Module], float],
    finetune: Callable[[nn.Module], object] | None = None,
    round_to: int = 1,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    examples: int = DEFAULT_EXAMPLES,
    repeats: int = 20,
    progress: bool | None = None,
) -> Pareto:
    """Prune one trained model to several sizes: error against cost and latency.

    Each size starts from the next larger one, and is pruned and re-fitted as in ``prune``.

    Args:
        model: a trained model, or a ``GatedModel`` as ``gated.eval()`` computes. It is not changed.
        example_inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs that
            the model can be called with; None for a gated model.
        batches: your batches, as for ``prune``.
        loss: calls the model on a batch and returns a scalar.
        kwargs: keyword inputs of the call with the example inputs.
        fractions: budgets, as fractions of the dense cost.
        cost: ``"macs"``, ``"params"``, ``"weight_bytes"`` or ``"kv_bytes"``.
        evaluate: the error of a small model, which is in evaluation mode.
        finetune: trains a small model in place. It gets the re-fitted model in training mode. The
            next smaller size starts from the model before ``finetune``.
        round_to: widths are multiples of this.
        include: patterns such as ``"layers.*"``: only groups with such names lose units.
        exclude: patterns of groups that lose no units.
        examples: how many examples to use.
        repeats: how many calls are timed for each size; 0 for no timing.
        progress: False for no display, True for one, None for one in a terminal.

    Example:
        >>> import torch, hardconcrete as hc
        >>> layers = torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 2)
        >>> model, x = torch.nn.Sequential(*layers), torch.randn(64, 4)
        >>> loss = lambda model, x: (model(x) - x[:, :2]).square().mean()
        >>> error = lambda small: loss(small, x).item()
        >>> curve = hc.pareto(model, x[:2], [x], loss, fractions=[0.5, 1.0], evaluate=error)
        >>> [point.macs for point in curve]
        [48, 108]
    """
    several = isinstance(fractions, Iterable) and not isinstance(fractions, Tensor | str)
    if not several or not (fractions := [*map(_as_fraction, fractions)]):
        raise ArgumentError("pareto needs fractions of the dense cost, in a list")
    for name, function in {"evaluate": evaluate, "finetune": finetune}.items():
        if not callable(function) and not (name == "finetune" and function is None):
            raise ArgumentError(f"{name} is a {type(function).__name__}; it takes a function")
    if cost not in KINDS:
        raise ArgumentError(f"cost={cost!r} is not known; use one of {', '.join(KINDS)}")
    refuse_no_count(round_to=round_to, examples=examples)
    if type(repeats) is not int or repeats < 0 or repeats == 1:
        raise ArgumentError(f"repeats={repeats!r} must be 0, or at least 2")
    request = PruningRequest({cost: min(fractions)}, include=include, exclude=exclude)
    with random_state_kept(), torch.inference_mode(False):
        inputs = example_inputs, kwargs
        state = start_pruning(model, inputs, batches, loss, request, examples)
        sizes = prune_to_sizes(state, fractions, cost, round_to, progress)
    for small in sizes.values():
        if finetune is not None:
            with torch.inference_mode(False), torch.enable_grad():
                finetune(small.train())
        small.eval()
    models = [sizes[fraction] for fraction in fractions]
    times = _median_ms(models, state.gated, repeats) if repeats else [None] * len(models)
    points = []
    for fraction, small, ms in zip(fractions, models, times, strict=True):
        costs = count(small, *state.gated.example)
        with torch.no_grad():
            error = _as_error(evaluate(small))
        points.append(Point(fraction, costs.macs, costs.params, error, ms, costs.kv_bytes))
    return Pareto(tuple(points))


def _as_fraction(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{value!r} is no fraction of the dense cost") from error


def _as_error(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"evaluate(model) must return a number, and returned a {type(value).__name__}"
        ) from error


def _median_ms(models: Sequence[nn.Module], gated: GatedModel, repeats: int) -> list[float]:
    """Milliseconds of a call of each model. The models are called in turn."""
    args, kwargs = gated.example
    calls = [partial(model, *args, **kwargs) for model in models]
    wait = partial(wait_for, [gated.gates.device])
    with torch.inference_mode():
        return [quartiles(times)[0] for times in interleaved(calls, repeats, wait)]
