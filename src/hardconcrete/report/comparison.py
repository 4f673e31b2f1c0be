"""The report of ``measure``: counts and latencies of two models, as a table and for JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hardconcrete.cost import Count
from hardconcrete.cost.count import readable_bytes
from hardconcrete.errors import ArgumentError

CUDNN_NOTE = (
    "cuDNN chose the convolutions by its rules, which suit common widths: small models may be far "
    "faster\nwith torch.backends.cudnn.benchmark = True from the start of the process."
)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call at one batch size, of each model in its fastest layout.

    Args:
        batch: examples in a call.
        before_ms: the median over the calls of the first model.
        after_ms: the median of the second model.
        before_spread: the first and third quartile of the first model.
        after_spread: the quartiles of the second model.
        before_layout: the fastest of the measured layouts of the first model.
        after_layout: the fastest of the second model.

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
        """Latency before, divided by latency after."""
        return _ratio(self.before_ms, self.after_ms)


@dataclass(frozen=True)
class Report:
    """What ``measure`` returns; print it for a table.

    Args:
        before: the counts of the first model, for one example.
        after: the counts of the second model.
        latencies: one for each batch size.
        repeats: the timed calls of each latency.
        layouts: the measured layouts.
        device: the device of the timed calls.
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
        """Latency before, divided by latency after, at one of the measured batch sizes."""
        for latency in self.latencies:
            if latency.batch == batch:
                return latency.speedup
        measured = ", ".join(str(latency.batch) for latency in self.latencies)
        raise ArgumentError(f"batch {batch} was not measured, only {measured}")

    @property
    def compression(self) -> float:
        """Parameters before, divided by parameters after."""
        return _ratio(self.before.params, self.after.params)

    @property
    def promise(self) -> float:
        """Multiply-adds before, divided by those after: the speed-up if they took all the time."""
        return _ratio(self.before.macs, self.after.macs)

    @property
    def realised(self) -> dict[int, float]:
        """The speed-up divided by the promise, by batch size."""
        return {entry.batch: _ratio(entry.speedup, self.promise) for entry in self.latencies}

    def to_dict(self) -> dict[str, Any]:
        """The report and its ratios for JSON, with None for infinity."""
        record = asdict(self) | {"torch": torch.__version__}
        record |= {"compression": _finite(self.compression), "promise": _finite(self.promise)}
        for written, latency in zip(record["latencies"], self.latencies, strict=True):
            written["speedup"] = _finite(latency.speedup)
            written["realised"] = _finite(_ratio(latency.speedup, self.promise))
        return record

    def __str__(self) -> str:
        return "\n".join([*_aligned(_rows(self)), *_notes(self)])


def _ratio(before: float, after: float) -> float:
    if after == 0:
        return 1.0 if before == 0 else math.inf
    return before / after


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rows(report: Report) -> list[tuple[str, str, str, str]]:
    before, after = report.before, report.after
    rows = [("", "before", "after", "ratio")]
    counts = [
        ("parameters", "params", "{:,}".format),
        ("MACs", "macs", "{:,}".format),
        ("weights", "weight_bytes", readable_bytes),
        ("activations", "activation_bytes", readable_bytes),
    ]
    if before.kv_bytes and after.kv_bytes is not None:
        counts.append(("keys and values per token", "kv_bytes", readable_bytes))
    for name, key, formatted in counts:
        old, new = getattr(before, key), getattr(after, key)
        rows.append((name, formatted(old), formatted(new), _times(_ratio(old, new))))
    for entry in report.latencies:
        old = _median_and_quartiles(entry.before_ms, entry.before_spread)
        new = _median_and_quartiles(entry.after_ms, entry.after_spread)
        rows.append((f"latency, batch {entry.batch}", old, new, _times(entry.speedup)))
        if report.layouts != ("contiguous",):
            rows.append(("  fastest layout", entry.before_layout, entry.after_layout, ""))
    return rows


def _times(ratio: float) -> str:
    return f"{ratio:,.1f}x" if ratio >= 0.95 else f"{ratio:.2f}x"


def _median_and_quartiles(median: float, spread: tuple[float, float]) -> str:
    """The median with three digits, and the quartiles with the same number of decimals."""
    decimals = max(0, 2 - math.floor(math.log10(median))) if median > 0 else 2
    return f"{median:.{decimals}f} ({spread[0]:.{decimals}f}-{spread[1]:.{decimals}f}) ms"


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
        *([CUDNN_NOTE] if report.by_rules else []),
    ]
