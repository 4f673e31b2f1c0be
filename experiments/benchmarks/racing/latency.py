"""Latencies of networks in the results, each in turn with the dense one, in one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from benchmarks.racing.data import CLASSES
from benchmarks.racing.networks import build, macs, with_sizes
from benchmarks.racing.run import Line
from hardconcrete_paper.training.latencies import Replayed

CPU_BATCHES = (1, 64)
GPU_BATCHES = (128,)
REPEATS = 30

INPUTS = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "mnist": (1, 28, 28)}

DISTINCT = ("network", "dataset", "cell", "method", "target", "peak_lr", "round_to")
"""What lines differ in, besides seeds, that are measured each."""

Latency = dict[str, Any]


def add_latencies(out: Path, device: str, threads: int) -> None:
    """Fill in ``latency`` on one device, with random weights of the widths at hand.

    Of the networks that were tested on the test set, the first seed of each method and target.
    """
    torch.set_num_threads(threads)
    for file in sorted(out.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in _first_seeds(lines):
            if device not in _devices(line):
                line["latency"] = (line["latency"] or {}) | _measure(line, device)
                print(file.stem, line["cell"], line["method"], line["target"], line["latency"])
                _write(file, lines)


def _first_seeds(lines: list[Line]) -> list[Line]:
    first: dict[tuple[Any, ...], Line] = {}
    tested = (line for line in lines if not line["validate"])
    for line in sorted(tested, key=lambda line: line["seed"]):
        first.setdefault(tuple(line[name] for name in DISTINCT), line)
    return [*first.values()]


def _devices(line: Line) -> set[str]:
    """Where it was measured already."""
    return {key.split()[0] for key in line["latency"] or {}}


def _write(file: Path, lines: list[Line]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draft.replace(file)


def _measure(line: Line, device: str) -> Latency:
    """Milliseconds of the dense and the small network, and the ratio; medians of calls in turn."""
    classes, shape = CLASSES[line["dataset"]], INPUTS[line["dataset"]]
    dense = build(line["network"], classes)
    small = with_sizes(line["network"], classes, line["widths"])
    if macs(small, torch.zeros(1, *shape)) != line["macs"]:
        raise ValueError(f"the widths of {line['method']} {line['target']} do not give its MACs")
    if device == "cpu":
        found = _timed(dense, small, torch.zeros(64, *shape), CPU_BATCHES, lambda model: model)
        return found | {"cpu_threads": torch.get_num_threads(), "cpu_torch": torch.__version__}
    images = torch.zeros(128, *shape, device=device, dtype=torch.bfloat16)
    dense, small = dense.to(device, torch.bfloat16), small.to(device, torch.bfloat16)
    found = _timed(dense, small, images, GPU_BATCHES, Replayed)
    return found | {"gpu": torch.cuda.get_device_name(), "gpu_torch": torch.__version__}


def _timed(
    dense: nn.Module,
    small: nn.Module,
    images: torch.Tensor,
    batches: tuple[int, ...],
    wrap: Callable[[nn.Module], nn.Module],
) -> Latency:
    """In its fastest layout each, as ``hc.measure`` reports it."""
    found: Latency = {}
    for batch in batches:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            report = hc.measure(
                wrap(dense),
                wrap(small),
                images,
                batches=[batch],
                repeats=REPEATS,
                layouts=("contiguous", "channels_last"),
            )
        (time,) = report.latencies
        found[f"{images.device.type} {batch}"] = {
            "dense_ms": round(time.before_ms, 4),
            "small_ms": round(time.after_ms, 4),
            "ratio": round(time.after_ms / time.before_ms, 4),
        }
    return found
