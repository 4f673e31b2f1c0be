"""Re-fitting: after units went, the weights that remain reproduce what the dense model computes.

Layer by layer, in the order of the forward pass: with the inputs X that the small model makes now,
and the results Y that the dense model had there, the new weights solve a ridge regression,

    W = (A + r I)^-1 (X^T Y + r W_0),    A = X^T X,    r = RIDGE times the mean of A's diagonal.

Where the results are added to a shortcut at once, Y is the dense model's sum less the small
model's shortcut: so what the shortcut misses is made up for (He et al., 2017, multi-branch
enhancement). No labels are needed, and no gradient.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete.graph.model_state import buffers_kept, in_mode, no_fast_path
from hardconcrete.importance.batches import Loss, keep_batches
from hardconcrete.importance.fitting import UnfitError, fit_weight
from hardconcrete.importance.recording import Recorder, Recording, Step
from hardconcrete.importance.walks import LabelledGraph, Stop, walking

RIDGE = 1e-2
"""How strongly weights are held where they were, as a part of the mean square of the inputs."""

MAX_BATCHES = 64
"""Batches that pass through the models side by side; each needs two threads."""

MEMORY_SHARE = 1 / 4
"""Share of the device's memory for what they keep; of larger batches fewer are used."""

UNKNOWN_MEMORY = 16 * 2**30
"""Bytes of memory where the system does not say how many there are."""

LIVE_LAYERS = 8
"""As many times the inputs and results of the largest layer both models keep for a batch."""


@dataclass(frozen=True)
class Refit:
    """Which weights were re-fitted, and which were not, with the reason.

    Args:
        fitted: for every parameter the part of its targets' variance that is still missed.
        skipped: every other parameter that a contraction reads, and why; and parameters with
            zeros that the dense model does not have and that no known contraction reads.

    Example:
        >>> print(Refit({"conv1.weight": 0.02}, {"mix": "it is read by einsum"}))
        re-fitted 1 weight; of the dense model's activations 2.0% is missed (conv1.weight: most)
        not re-fitted: mix (it is read by einsum)
    """

    fitted: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        many = "s" * (len(self.fitted) != 1)
        lines = [f"re-fitted {len(self.fitted)} weight{many}"]
        if self.fitted:
            mean = sum(self.fitted.values()) / len(self.fitted)
            worst = max(self.fitted, key=self.fitted.__getitem__)
            lines[0] += f"; of the dense model's activations {mean:.1%} is missed ({worst}: most)"
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
) -> Refit:
    """Give the weights of ``small``, in place, the values that imitate ``dense`` best.

    Both are modules of the same class and sizes, without gates. A weight that is zero stays zero:
    so a unit whose readers are zero stays shut. Biases, and the means of batch norms that follow at
    once, are fitted too; all else stays as it is.

    Every batch passes through each model once, all side by side, so a forward must not keep its own
    state in the model. In memory are, at a time: for each batch what both models keep alive between
    two layers, a few Gram matrices in float64, and chunks of 2^22 entries of rows. At most 64
    batches are used, in two threads each, and no more than fit into a quarter of the device's
    memory: choose batches of 32 examples or more.

    Args:
        small: the model to change.
        dense: the model to imitate, which stays as it is.
        batches: seen by both; labels are not used.
        loss: calls the model it is given; what it returns is not used.
        ridge: see ``RIDGE``.
        compensate: fit sums with a shortcut, not the branch alone.

    Example:
        >>> import copy
        >>> dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> small = copy.deepcopy(dense)
        >>> _ = small[1].weight.data[:, 0].zero_()  # the first unit went
        >>> batches = torch.randn(8, 32, 4)
        >>> before = (small(batches) - dense(batches)).square().mean()
        >>> result = refit(small, dense, batches.unbind(), lambda model, x: model(x))
        >>> bool((small(batches) - dense(batches)).square().mean() < before)
        True
    """
    if not ridge > 0:
        raise ArgumentError(f"ridge={ridge} must be above 0, such as {RIDGE}")
    _refuse_others(small, dense)
    examples = keep_batches(batches, batches_at_most=MAX_BATCHES)
    with ExitStack() as stack:
        for model in (small, dense):
            stack.enter_context(in_mode(model, training=False))
        stack.enter_context(buffers_kept(dense))
        stack.enter_context(no_fast_path())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        recording = _record(dense, examples[0], loss)
        examples = examples[: _batches_in_memory(recording, next(dense.parameters()).device)]
        steps = [step if compensate else replace(step, to_sum=False) for step in recording.steps]
        teachers = [LabelledGraph(dense, batch, loss, steps, after=True) for batch in examples]
        students = [LabelledGraph(small, batch, loss, steps, after=False) for batch in examples]
        stack.enter_context(walking([*teachers, *students]))
        fitted, skipped = _fit_in_order(steps, students, teachers, (small, dense), ridge)
    return Refit(fitted, skipped | _never_contracted(small, dense, recording))


def _batches_in_memory(recording: Recording, device: torch.device) -> int:
    """How many batches may pass through the models side by side: one at least."""
    available = MEMORY_SHARE * memory_of(device)
    return max(1, int(available / max(1, LIVE_LAYERS * recording.largest)))


def memory_of(device: torch.device) -> int:
    """Bytes of memory, used or not: the same in every run."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY


def _refuse_others(small: nn.Module, dense: nn.Module) -> None:
    """Refuse models that are not of the same class and sizes."""
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
    steps: Sequence[Step],
    students: Sequence[LabelledGraph],
    teachers: Sequence[LabelledGraph],
    models: tuple[nn.Module, nn.Module],
    ridge: float,
) -> tuple[dict[str, float], dict[str, str]]:
    """What was re-fitted, with what is missed; and what was not, with the reason."""
    fitted: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for step in steps:
        if step.reason is not None:
            skipped[step.name] = step.reason
            continue
        targets = [_next_stop(walk, step) for walk in teachers]
        calls = [_next_stop(walk, step) for walk in students]
        small, dense = (m.get_buffer(step.norm) if step.norm else None for m in models)
        means = None if small is None or dense is None else (small, dense)
        try:
            missing = fit_weight(step, calls, targets, means, ridge)
            fitted[step.name] = max(missing, fitted.get(step.name, 0.0))
        except UnfitError as reason:
            skipped[step.name] = str(reason)
    return fitted, skipped


def _next_stop(walk: LabelledGraph, step: Step) -> Stop:
    stop = walk.advance()
    if stop is None or stop.contraction.name != step.name:
        raise CompactionError(f"{step.name}: re-fitting lost its place in the model's call")
    return stop


def _never_contracted(small: nn.Module, dense: nn.Module, recording: Recording) -> dict[str, str]:
    """Parameters of which something was shut, and that no known contraction reads."""
    contracted = {step.name for step in recording.steps}
    reasons = {}
    for (name, weight), other in zip(small.named_parameters(), dense.parameters(), strict=True):
        if name in contracted or weight.dim() < 2:
            continue
        if bool(((weight == 0) & (other != 0).to(weight.device)).any()):
            readers = recording.readers.get(name, ())
            reasons[name] = (
                f"{readers[0]} reads it, which re-fitting does not know"
                if readers
                else "nothing reads it in this call"
            )
    return reasons
