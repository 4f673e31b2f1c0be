"""Re-fitting: the remaining weights reproduce what the dense model computes.

The layers are fitted in the order of the forward pass. Let X be a layer's inputs in the small model
and Y its outputs in the dense model. The new weights solve a ridge regression,

    W = (A + r I)^-1 (X^T Y + r W_0),    A = X^T X,    r = RIDGE times the mean of A's diagonal.

Where a shortcut is added directly to the outputs, Y is the dense model's sum minus the small
model's shortcut. So the layer also corrects errors of the shortcut (He et al., 2017, multi-branch
enhancement). No labels and no gradients are needed.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.graph.model_state import buffers_kept, in_mode, no_fast_path
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.fit_layer import CannotRefitError, fit_weight
from hardconcrete.importance.lockstep import PausableCall, PausedLayer, ending_threads
from hardconcrete.importance.recording import RecordedLayer, Recorder, Recording
from hardconcrete.importance.relevant_rows import RelevantRows

RIDGE = 1e-2
"""How strongly weights stay close to their values, as a fraction of the inputs' mean square."""

MAX_BATCHES = 64
"""Batches that pass through the models in lockstep. Each needs two threads."""

MAX_MEMORY_FRACTION = 1 / 4
"""Fraction of the device's memory for the activations of these batches."""

DEFAULT_MEMORY_BYTES = 16 * 2**30
"""Assumed where the system does not report its memory."""

LAYERS_IN_MEMORY = 8
"""Both models' activations of a batch take about as much memory as this many largest layers."""


@dataclass(frozen=True)
class RefitResult:
    """Which weights were re-fitted, and why others were not.

    Args:
        fitted: for each re-fitted parameter, the unexplained fraction of its targets' variance.
        skipped: for each other weight of a layer, the reason. It also has parameters that lost
            units and that no known layer uses.

    Example:
        >>> print(RefitResult({"conv1.weight": 0.02}, {"mix": "einsum uses it"}))
        re-fitted 1 weight; 2.0% of the dense activations is not reproduced (worst: conv1.weight)
        not re-fitted: mix (einsum uses it)
    """

    fitted: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        plural = "s" * (len(self.fitted) != 1)
        lines = [f"re-fitted {len(self.fitted)} weight{plural}"]
        if self.fitted:
            mean = sum(self.fitted.values()) / len(self.fitted)
            worst = max(self.fitted, key=self.fitted.__getitem__)
            lines[0] += f"; {mean:.1%} of the dense activations is not reproduced (worst: {worst})"
        lines += [f"not re-fitted: {name} ({reason})" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def refit(
    small: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    ridge: float = RIDGE,
    compensate: bool = True,
    relevant: Sequence[RelevantRows] | None = None,
) -> RefitResult:
    """Change the weights of ``small``, in place, so that it computes what ``dense`` does.

    Both are modules of the same class and sizes, without gates. A weight that is zero stays zero,
    so a closed unit stays closed. Biases are fitted too, and so are the running means of batch
    norms that directly follow a layer. Nothing else changes.

    All batches pass through each model once, in lockstep, so a forward must not keep state in the
    model. Memory holds the activations that both models keep between two layers for each batch, a
    few Gram matrices in float64, and chunks of 2^22 entries of rows. At most 64 batches are used,
    in two threads each, and only as many as fit into a quarter of the device's memory. Choose
    batches of 32 examples or more.

    Args:
        small: the model to change.
        dense: the model to imitate. It is not changed.
        batches: passed to both models. Labels are not used.
        loss: calls the model on a batch. Its value is not used.
        ridge: how strongly weights stay close to their values, as a fraction of the mean square of
            the inputs.
        compensate: fit the sum with a shortcut, not the branch alone.
        relevant: for each batch, the rows that count (see ``relevant_rows``); None for all.

    Example:
        >>> import copy
        >>> dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> small = copy.deepcopy(dense)
        >>> _ = small[1].weight.data[:, 0].zero_()  # the first unit is pruned
        >>> batches = torch.randn(8, 32, 4)
        >>> before = (small(batches) - dense(batches)).square().mean()
        >>> result = refit(small, dense, batches.unbind(), lambda model, x: model(x))
        >>> bool((small(batches) - dense(batches)).square().mean() < before)
        True
    """
    if not ridge > 0:
        raise ArgumentError(f"ridge={ridge} must be above 0, such as {RIDGE}")
    _refuse_different_sizes(small, dense)
    kept = keep_batches(batches, max_batches=MAX_BATCHES)
    with ExitStack() as stack:
        for model in (small, dense):
            stack.enter_context(in_mode(model, training=False))
        stack.enter_context(buffers_kept(dense))
        stack.enter_context(no_fast_path())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        recording = _record(dense, kept[0], loss)
        kept = kept[: _batches_in_memory(recording, next(dense.parameters()).device)]
        layers = recording.layers
        if not compensate:
            layers = [replace(layer, feeds_addition=False) for layer in layers]
        targets = [PausableCall(dense, batch, loss, layers, pause_after=True) for batch in kept]
        calls = [PausableCall(small, batch, loss, layers, pause_after=False) for batch in kept]
        stack.enter_context(ending_threads([*targets, *calls]))
        fit = partial(fit_weight, ridge=ridge, relevant=relevant)
        fitted, skipped = _fit_in_order(layers, calls, targets, (small, dense), fit)
    return RefitResult(fitted, skipped | _not_in_any_layer(small, dense, recording))


def _batches_in_memory(recording: Recording, device: torch.device) -> int:
    """The number of batches whose activations fit in memory; at least one."""
    available = MAX_MEMORY_FRACTION * memory_of(device)
    return max(1, int(available / max(1, LAYERS_IN_MEMORY * recording.max_layer_bytes)))


def memory_of(device: torch.device) -> int:
    """Total bytes of memory. Free memory would differ from run to run."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return DEFAULT_MEMORY_BYTES


def _refuse_different_sizes(small: nn.Module, dense: nn.Module) -> None:
    """Refuse models whose parameters differ in names or sizes."""
    shapes, expected = ({n: p.shape for n, p in m.named_parameters()} for m in (small, dense))
    for name in sorted(shapes.keys() ^ expected.keys()):
        where = "small" if name in shapes else "dense"
        raise ArgumentError(f"only {where} has a parameter {name}: re-fit before units are cut out")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ArgumentError(
                f"{name} is {list(shape)} in small and {list(expected[name])} in dense: re-fit "
                "before units are cut out"
            )


def _record(model: nn.Module, batch: Any, loss: Loss) -> Recording:
    recorder = Recorder(model)
    with torch.no_grad(), recorder:
        loss(model, batch)
    return recorder.recording()


def _fit_in_order(
    layers: Sequence[RecordedLayer],
    calls: Sequence[PausableCall],
    targets: Sequence[PausableCall],
    models: tuple[nn.Module, nn.Module],
    fit: Callable[..., float],
) -> tuple[dict[str, float], dict[str, str]]:
    """Fit layer by layer; return the unexplained fractions, and the reasons for skipping."""
    fitted: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for layer in layers:
        if layer.skip_reason is not None:
            skipped[layer.name] = layer.skip_reason
            continue
        in_dense = [_advance_to(layer, call) for call in targets]
        in_small = [_advance_to(layer, call) for call in calls]
        small, dense = (m.get_buffer(layer.norm) if layer.norm else None for m in models)
        means = None if small is None or dense is None else (small, dense)
        try:
            unexplained = fit(layer, in_small, in_dense, means)
            fitted[layer.name] = max(unexplained, fitted.get(layer.name, 0.0))
        except CannotRefitError as reason:
            skipped[layer.name] = str(reason)
    return fitted, skipped


def _advance_to(layer: RecordedLayer, call: PausableCall) -> PausedLayer:
    paused = call.advance()
    if paused is None or paused.call.name != layer.name:
        raise CompactionError(f"{layer.name}: re-fitting lost its place in the model's call")
    return paused


def _not_in_any_layer(small: nn.Module, dense: nn.Module, recording: Recording) -> dict[str, str]:
    """Why parameters that lost units and that no known layer uses were not re-fitted."""
    weights = {layer.name for layer in recording.layers}
    reasons = {}
    for (name, weight), other in zip(small.named_parameters(), dense.parameters(), strict=True):
        if name in weights or weight.dim() < 2:
            continue
        if bool(((weight == 0) & (other != 0).to(weight.device)).any()):
            users = recording.users.get(name, ())
            reasons[name] = (
                f"{users[0]} uses it, which re-fitting does not know"
                if users
                else "nothing uses it in this call"
            )
    return reasons
