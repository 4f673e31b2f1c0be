"""``measure``: count and time two models on the same inputs."""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hardconcrete.compaction.shrink_history import dense_model
from hardconcrete.cost import count
from hardconcrete.cost.count import tensors_in
from hardconcrete.cost.example_inputs import batch_size, resampled
from hardconcrete.cost.latency.timing import Call, interleaved, quartiles, wait_for
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel, plain_copy
from hardconcrete.gating.class_swap import is_swapped
from hardconcrete.graph.example_inputs import ExampleInputs, as_inputs
from hardconcrete.report.comparison import Latency, Report

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""Ways to lay out images and the weights of convolutions in memory."""


def measure(
    before: nn.Module,
    after: nn.Module,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: Sequence[int] = (1, 64),
    repeats: int = 30,
    layouts: Sequence[str] = ("contiguous",),
) -> Report:
    """Count and time two models on the same inputs.

    Copies are measured in evaluation mode, so the models do not change. A ``GatedModel`` is
    measured as the dense model inside it. Both models are warmed up and then called in turn, so
    that a machine that slows down slows both.

    Args:
        before: the model to compare with.
        after: the smaller model, on the same device.
        inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs. Tensors with
            the length of the first one have a row per example. They are cut or repeated along
            dimension 0 to the batch sizes.
        kwargs: keyword inputs of the same call.
        batches: batch sizes to time. The counts are of one example.
        repeats: timed calls of each model, at each batch size.
        layouts: ``"contiguous"``, ``"channels_last"`` or both. Models with convolutions of images
            are timed in each layout that they can run in, and the fastest is reported.

    Example:
        >>> dense = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
        >>> small = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 2))
        >>> report = measure(dense, small, torch.zeros(16, 8), batches=[1, 32], repeats=5)
        >>> report.before.macs, report.after.macs, [entry.batch for entry in report.latencies]
        (60, 30, [1, 32])
    """
    _check_settings(batches, repeats, layouts)
    example = as_inputs(inputs, kwargs)
    size = batch_size(example)
    models = (_plain("before", before), _plain("after", after))
    devices = _devices(example, models)
    by_batch = {batch: resampled(example, size, batch) for batch in (1, *batches)}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        timed = [
            _LaidOut(model, layouts, [by_batch[batch] for batch in batches]) for model in models
        ]
        latencies = [_latency(timed, by_batch[batch], batch, repeats, devices) for batch in batches]
    return Report(
        before=count(models[0], *by_batch[1]),
        after=count(models[1], *by_batch[1]),
        latencies=tuple(latencies),
        repeats=repeats,
        layouts=tuple(dict.fromkeys(chain(*(each.copies for each in timed)))),
        device=_device_name(devices[0]),
        by_rules=_uses_cudnn_heuristics(devices, models),
    )


class _LaidOut:
    """Copies of a model, one for each layout that it can run in at all batch sizes."""

    def __init__(
        self, model: nn.Module, layouts: Sequence[str], inputs: Sequence[ExampleInputs]
    ) -> None:
        names = layouts if _has_images(model) else ["contiguous"]
        self.copies: dict[str, nn.Module] = {}
        for name in names:
            laid_out = _copy(model).eval().to(memory_format=LAYOUTS[name])
            if name == "contiguous" or all(_runs(laid_out, _laid_out(x, name)) for x in inputs):
                self.copies[name] = laid_out
        if not self.copies:
            raise ArgumentError(f"the model does not run in layout {', '.join(layouts)}")

    def calls(self, inputs: ExampleInputs) -> list[Call]:
        """A call for each layout."""
        laid_out = [(model, _laid_out(inputs, name)) for name, model in self.copies.items()]
        return [partial(model, *args, **kwargs) for model, (args, kwargs) in laid_out]


def _latency(
    timed: Sequence[_LaidOut],
    inputs: ExampleInputs,
    batch: int,
    repeats: int,
    devices: Iterable[torch.device],
) -> Latency:
    calls = [each.calls(inputs) for each in timed]
    with torch.inference_mode():
        times = iter(interleaved([*chain(*calls)], repeats, partial(wait_for, devices)))
    (before, before_layout), (after, after_layout) = (
        min((quartiles(next(times)), name) for name in each.copies) for each in timed
    )
    return Latency(batch, before[0], after[0], before[1:], after[1:], before_layout, after_layout)


def _check_settings(batches: Sequence[int], repeats: int, layouts: Sequence[str]) -> None:
    sizes = [*batches] if isinstance(batches, Sequence) else []
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ArgumentError(f"batches={batches!r} must be one or more sizes of at least 1")
    if type(repeats) is not int or repeats < 2:
        raise ArgumentError(f"repeats={repeats!r} must be at least 2: the spread needs two calls")
    names = [*layouts] if isinstance(layouts, Sequence) else []
    if not names or any(not isinstance(name, str) or name not in LAYOUTS for name in names):
        known = ", ".join(map(repr, LAYOUTS))
        raise ArgumentError(f"layouts={layouts!r} must be one or more of {known}")


def _plain(side: str, model: nn.Module) -> nn.Module:
    if isinstance(model, GatedModel):
        dense = dense_model(model)
        return plain_copy(dense, shared=dense.parameters())
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{side} is a {type(model).__name__}; measure takes an nn.Module")
    if any(is_swapped(module) for module in model.modules()):
        raise ArgumentError(
            f"{side} is the inside of a GatedModel; pass the GatedModel, which is measured as "
            "its dense model, or take the gates off: hc.remove_gates(gated)"
        )
    return model


def _copy(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # copies of exported graphs warn
        return copy.deepcopy(model)


def _devices(example: ExampleInputs, models: Iterable[nn.Module]) -> list[torch.device]:
    tensors = chain(tensors_in(example), *(model.parameters() for model in models))
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if any(device.type == "meta" for device in devices):
        raise ArgumentError(
            "meta tensors cannot be timed; use count for them, or pass tensors with data"
        )
    return devices


def _has_images(model: nn.Module) -> bool:
    """Judged by the weights, because exported graphs have no layers.

    Weights with five dimensions exclude channels_last.
    """
    dims = {tensor.dim() for tensor in chain(model.parameters(), model.buffers())}
    return 4 in dims and 5 not in dims


def _uses_cudnn_heuristics(devices: Iterable[torch.device], models: Iterable[nn.Module]) -> bool:
    """Whether convolutions ran on a GPU with ``torch.backends.cudnn.benchmark`` off."""
    on_gpu = any(device.type == "cuda" for device in devices)
    return on_gpu and any(map(_has_images, models)) and not torch.backends.cudnn.benchmark


def _laid_out(inputs: ExampleInputs, name: str) -> ExampleInputs:
    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=LAYOUTS[name]) if tensor.dim() == 4 else tensor

    return tree_map_only(Tensor, laid_out, inputs)  # type: ignore[no-any-return]


def _runs(model: nn.Module, inputs: ExampleInputs) -> bool:
    """Whether a forward accepts a layout; one that calls ``view`` on its images does not."""
    try:
        with torch.inference_mode():
            model(*inputs[0], **inputs[1])
    except RuntimeError:
        return False
    return True


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} with {threads} thread{'s' if threads > 1 else ''}"
