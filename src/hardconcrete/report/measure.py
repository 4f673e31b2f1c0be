"""A model before and after, side by side: what it costs by count and by the clock."""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hardconcrete.compaction.shrink_history import expanded
from hardconcrete.cost import Count, count
from hardconcrete.cost.count import readable_bytes, tensors_in
from hardconcrete.cost.example_inputs import ExampleInputs, batch_size, resampled
from hardconcrete.cost.latency.timing import Call, interleaved, quartiles, wait_for
from hardconcrete.errors import ArgumentError
from hardconcrete.gating import GatedModel, plain_copy
from hardconcrete.gating.class_swap import is_swapped

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""Ways to lay out images and the weights of convolutions in memory."""

BY_RULES = (
    "cuDNN chose the convolutions by its rules, which suit common widths: small models may be far "
    "faster\nwith torch.backends.cudnn.benchmark = True from the start of the process."
)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call at one batch size, of each model in its fastest layout.

    Args:
        batch: examples in a call.
        before_ms: median over the calls.
        after_ms: the same of the other model.
        before_spread: first and third quartile.
        after_spread: the same of the other model.
        before_layout: the fastest layout among those tried.
        after_layout: the same of the other model.

    Example:
        >>> Latency(64, 3.0, 1.5, (2.9, 3.2), (1.4, 1.6)).speedup
        2.0
    """

    batch: int
    before_ms: float
    after_ms: float
    before_spread: tuple[float, float]
    after_spread: tuple[float, float]
    before_layout: str = "contiguous"
    after_layout: str = "contiguous"

    @property
    def speedup(self) -> float:
        """How many times faster the model is after."""
        return _ratio(self.before_ms, self.after_ms)


@dataclass(frozen=True)
class Report:
    """What ``measure`` returns; print it for a table.

    Args:
        before: the count of the model before, for one example.
        after: the same of the model after.
        latencies: one per batch size.
        repeats: timed calls behind each latency.
        layouts: the layouts that were tried.
        device: where the clock ran.
        by_rules: whether convolutions ran on a GPU with ``torch.backends.cudnn.benchmark`` off.

    Example:
        >>> latency = Latency(64, 3.0, 1.5, (2.9, 3.2), (1.4, 1.6))
        >>> report = Report(Count(80, 800, 320, 99), Count(20, 200, 80, 33), (latency,), 30)
        >>> print(report)
                                        before                after  ratio
        parameters                          80                   20   4.0x
        MACs                               800                  200   4.0x
        weights                          320 B                 80 B   4.0x
        activations                       99 B                 33 B   3.0x
        latency, batch 64  3.00 (2.90-3.20) ms  1.50 (1.40-1.60) ms   2.0x
        Counts of one example; median latency (quartiles) of 30 calls on cpu.
        Of the 4.0x that the MACs promise, the clock shows 50% at batch 64.
        >>> report.speedup(64), report.compression, report.realised
        (2.0, 4.0, {64: 0.5})
    """

    before: Count
    after: Count
    latencies: tuple[Latency, ...]
    repeats: int
    layouts: tuple[str, ...] = ("contiguous",)
    device: str = "cpu"
    by_rules: bool = False

    def speedup(self, batch: int) -> float:
        """How many times faster the model is after, at one of the batch sizes measured."""
        for latency in self.latencies:
            if latency.batch == batch:
                return latency.speedup
        measured = ", ".join(str(latency.batch) for latency in self.latencies)
        raise ArgumentError(f"batch {batch} was not measured, only {measured}")

    @property
    def compression(self) -> float:
        """Parameters before, over parameters after."""
        return _ratio(self.before.params, self.after.params)

    @property
    def promise(self) -> float:
        """Multiply-adds before, over multiply-adds after: the speed-up if they took all time."""
        return _ratio(self.before.macs, self.after.macs)

    @property
    def realised(self) -> dict[int, float]:
        """The share of the promise that the clock shows, by batch size: speed-up over promise."""
        return {entry.batch: _ratio(entry.speedup, self.promise) for entry in self.latencies}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all that is in the report, and what follows from it; None for infinity."""
        record = asdict(self) | {"torch": torch.__version__}
        record |= {"compression": _finite(self.compression), "promise": _finite(self.promise)}
        for written, latency in zip(record["latencies"], self.latencies, strict=True):
            written["speedup"] = _finite(latency.speedup)
            written["realised"] = _finite(_ratio(latency.speedup, self.promise))
        return record

    def __str__(self) -> str:
        return "\n".join([*_aligned(_rows(self)), *_notes(self)])


def measure(
    before: nn.Module,
    after: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: Sequence[int] = (1, 64),
    repeats: int = 30,
    layouts: Sequence[str] = ("contiguous",),
) -> Report:
    """Count and time two models on the same inputs.

    Copies are measured, in evaluation mode, and the models stay as they are. A ``GatedModel``
    stands for the dense model under its gates. Both models are warmed up and then called in turn,
    so that a machine that slows down slows both.

    Args:
        before: the model to compare with.
        after: the model that was made from it, on the same device.
        inputs: a tensor, or a tuple of positional inputs. Tensors as long as the first one have a
            row per example, and are cut or repeated along dimension 0 to the batch sizes.
        kwargs: keyword inputs of the same call.
        batches: batch sizes to time. The counts are of one example.
        repeats: timed calls of each model, at each batch size.
        layouts: ``"contiguous"``, ``"channels_last"`` or both. Models with convolutions of images
            are timed in each that they can run in, and the fastest is reported.

    Example:
        >>> dense = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
        >>> small = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 2))
        >>> report = measure(dense, small, torch.zeros(16, 8), batches=[1, 32], repeats=5)
        >>> report.before.macs, report.after.macs, [entry.batch for entry in report.latencies]
        (60, 30, [1, 32])
    """
    _check_settings(batches, repeats, layouts)
    given = (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), dict(kwargs or {}))
    size = batch_size(given)
    models = (_plain("before", before), _plain("after", after))
    devices = _devices(given, models)
    by_batch = {batch: resampled(given, size, batch) for batch in (1, *batches)}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        timed = [_Timed(model, layouts, [by_batch[batch] for batch in batches]) for model in models]
        latencies = [_latency(timed, by_batch[batch], batch, repeats, devices) for batch in batches]
    return Report(
        before=count(models[0], *by_batch[1]),
        after=count(models[1], *by_batch[1]),
        latencies=tuple(latencies),
        repeats=repeats,
        layouts=tuple(dict.fromkeys(chain(*(each.copies for each in timed)))),
        device=_words(devices[0]),
        by_rules=_by_rules(devices, models),
    )


class _Timed:
    """A model, copied into every layout that it can run in at all batch sizes."""

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
        """One call for each layout."""
        laid_out = [(model, _laid_out(inputs, name)) for name, model in self.copies.items()]
        return [partial(model, *args, **kwargs) for model, (args, kwargs) in laid_out]


def _latency(
    timed: Sequence[_Timed],
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
    if not batches or any(not isinstance(batch, int) or batch < 1 for batch in batches):
        raise ArgumentError(f"batches={batches!r} must be one or more sizes of at least 1")
    if repeats < 2:
        raise ArgumentError(f"repeats={repeats} must be at least 2: the spread needs two calls")
    if not layouts or not {*layouts} <= {*LAYOUTS}:
        known = ", ".join(map(repr, LAYOUTS))
        raise ArgumentError(f"layouts={layouts!r} must be one or more of {known}")


def _plain(side: str, model: nn.Module) -> nn.Module:
    if isinstance(model, GatedModel):
        return plain_copy(expanded(model))
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{side} is a {type(model).__name__}; measure takes an nn.Module")
    if any(is_swapped(module) for module in model.modules()):
        raise ArgumentError(
            f"{side} is the inside of a GatedModel; give the GatedModel, which stands for its "
            "dense model, or take the gates off: hc.remove_gates(gated)"
        )
    return model


def _copy(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # exported graphs warn of torch's own inside
        return copy.deepcopy(model)


def _devices(given: ExampleInputs, models: Iterable[nn.Module]) -> list[torch.device]:
    tensors = chain(tensors_in(given), *(model.parameters() for model in models))
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if any(device.type == "meta" for device in devices):
        raise ArgumentError("meta tensors take no time; count works on them, measure needs data")
    return devices


def _has_images(model: nn.Module) -> bool:
    """By weights, since exported graphs have no layers; channels_last cannot hold volumes."""
    dims = {tensor.dim() for tensor in chain(model.parameters(), model.buffers())}
    return 4 in dims and 5 not in dims


def _by_rules(devices: Iterable[torch.device], models: Iterable[nn.Module]) -> bool:
    """Whether convolutions ran on a GPU and cuDNN was not asked to try what it has for them."""
    on_gpu = any(device.type == "cuda" for device in devices)
    return on_gpu and any(map(_has_images, models)) and not torch.backends.cudnn.benchmark


def _laid_out(inputs: ExampleInputs, name: str) -> ExampleInputs:
    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=LAYOUTS[name]) if tensor.dim() == 4 else tensor

    return tree_map_only(Tensor, laid_out, inputs)  # type: ignore[no-any-return]


def _runs(model: nn.Module, inputs: ExampleInputs) -> bool:
    """Whether a forward accepts a layout: one that views its images flat does not."""
    try:
        with torch.inference_mode():
            model(*inputs[0], **inputs[1])
    except RuntimeError:
        return False
    return True


def _words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} with {threads} thread{'s' if threads > 1 else ''}"


def _ratio(before: float, after: float) -> float:
    if after == 0:
        return 1.0 if before == 0 else math.inf
    return before / after


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rows(report: Report) -> list[tuple[str, str, str, str]]:
    before, after = report.before, report.after
    rows = [("", "before", "after", "ratio")]
    for name, key, written in (
        ("parameters", "params", "{:,}".format),
        ("MACs", "macs", "{:,}".format),
        ("weights", "weight_bytes", readable_bytes),
        ("activations", "activation_bytes", readable_bytes),
    ):
        old, new = getattr(before, key), getattr(after, key)
        rows.append((name, written(old), written(new), _times(_ratio(old, new))))
    for one in report.latencies:
        old, new = _span(one.before_ms, one.before_spread), _span(one.after_ms, one.after_spread)
        rows.append((f"latency, batch {one.batch}", old, new, _times(one.speedup)))
        if report.layouts != ("contiguous",):
            rows.append(("  fastest layout", one.before_layout, one.after_layout, ""))
    return rows


def _times(ratio: float) -> str:
    return f"{ratio:,.1f}x" if ratio >= 0.95 else f"{ratio:.2f}x"


def _span(median: float, spread: tuple[float, float]) -> str:
    """Three digits of the median, and as many places of the quartiles."""
    places = max(0, 2 - math.floor(math.log10(median))) if median > 0 else 2
    return f"{median:.{places}f} ({spread[0]:.{places}f}-{spread[1]:.{places}f}) ms"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _notes(report: Report) -> list[str]:
    shares = [f"{share:.0%} at batch {batch}" for batch, share in report.realised.items()]
    missing = dict.fromkeys((*report.before.uncounted, *report.after.uncounted))
    return [
        f"Counts of one example; median latency (quartiles) of {report.repeats} calls on "
        f"{report.device}.",
        *([f"The MACs lack those of {', '.join(missing)}."] if missing else []),
        f"Of the {_times(report.promise)} that the MACs promise, the clock shows "
        f"{' and '.join(shares)}.",
        *([BY_RULES] if report.by_rules else []),
    ]
