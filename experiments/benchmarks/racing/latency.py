"""Latencies of the networks in the results, each in turn with the dense one, in one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from benchmarks.racing.data import CLASSES
from benchmarks.racing.networks import build, macs, with_sizes
from hardconcrete_paper.training.latencies import Replayed

CPU_BATCHES = (1, 64)
GPU_BATCHES = (128,)
REPEATS = 30

INPUTS = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "mnist": (1, 28, 28)}

Latency = dict[str, Any]


def add_latencies(out: Path, device: str, threads: int) -> None:
    """Fill in ``latency`` of all lines that lack it, with random weights of their widths."""
    torch.set_num_threads(threads)
    for file in sorted(out.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        known = {_key(line): line["latency"] for line in lines if line["latency"]}
        for line in lines:
            if line["latency"] is None:
                key = _key(line)
                if key not in known:
                    known[key] = _measure(line, device)
                    print(file.stem, line["method"], line["target"], known[key], flush=True)
                line["latency"] = known[key]
        draft = file.with_suffix(".draft")
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines))
        draft.replace(file)


def _key(line: dict[str, Any]) -> str:
    return json.dumps([line["network"], line["dataset"], line["widths"]])


def _measure(line: dict[str, Any], device: str) -> Latency:
    """Milliseconds of the dense and the small network, and the ratio; medians of calls in turn."""
    classes, shape = CLASSES[line["dataset"]], INPUTS[line["dataset"]]
    dense = build(line["network"], classes)
    small = with_sizes(line["network"], classes, line["widths"])
    if macs(small, torch.zeros(1, *shape)) != line["macs"]:
        raise ValueError(f"the widths of {line['method']} {line['target']} do not give its MACs")
    found = _timed(dense, small, torch.zeros(64, *shape), CPU_BATCHES, lambda model: model)
    if device == "cuda":
        images = torch.zeros(128, *shape, device=device, dtype=torch.bfloat16)
        dense, small = dense.to(device, torch.bfloat16), small.to(device, torch.bfloat16)
        found |= _timed(dense, small, images, GPU_BATCHES, Replayed)
        found["gpu"] = torch.cuda.get_device_name()
    return found | {"cpu_threads": torch.get_num_threads(), "torch": torch.__version__}


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
