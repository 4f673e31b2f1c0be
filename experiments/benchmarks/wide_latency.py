"""To be tested: what is left of a wide network under a budget is faster on a GPU, not only smaller.

Networks with the widths of finished runs and any weights, since the clock does not look at those;
each against the dense one in turn, bfloat16, replayed as a CUDA graph, in its faster layout; and
compiled. cuDNN takes the fastest convolution that it finds by trying or, with ``--by-rules``, what
its rules say: a process is for one of the two, since torch remembers what was chosen first.

    python experiments/benchmarks/wide_latency.py results/wide/*/record.json [--by-rules]
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.report import environment
from hardconcrete_paper.cifar.experiment import CifarExperiment
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.latencies import Replayed

LAYOUTS = ("contiguous", "channels_last")


def cut_to(gated: hc.GatedModel, units: Sequence[int]) -> nn.Module:
    """A network of which so many units of each group are left."""
    nn.init.constant_(gated.gates.log_alpha, -9.0)
    for group, left in zip(gated.groups, units, strict=True):
        gated.gates.log_alpha.data[group.start : group.start + left] = 9.0
    return hc.compact(gated.eval())


def left_of(network: str, units: Sequence[int]) -> nn.Module:
    """The same for the groups that table 2 gates."""
    dense = CifarExperiment(network=network).build()
    return cut_to(hc.attach_gates(dense, torch.randn(2, 3, 32, 32), include="*.conv1"), units)


def timed(dense: nn.Module, small: nn.Module, batch: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of both, as they are and compiled."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    images = torch.randn(batch, 3, 32, 32, device=device, dtype=dtype)
    models = [model.to(device, dtype) for model in (dense, small)]
    pair = [Replayed(model) for model in models]
    (eager,) = hc.measure(*pair, images, batches=[batch], layouts=LAYOUTS).latencies
    torch._dynamo.reset()  # what has been compiled too often runs as it is
    last = [model.to(memory_format=torch.channels_last) for model in models]  # type: ignore[call-overload]
    pair = [Replayed(torch.compile(model, dynamic=False)) for model in last]  # type: ignore[arg-type]
    laid_out = images.contiguous(memory_format=torch.channels_last)
    (compiled,) = hc.measure(*pair, laid_out, batches=[batch], layouts=LAYOUTS[1:]).latencies
    found = {"eager": eager, "compiled": compiled}
    return {how: (round(t.before_ms, 4), round(t.after_ms, 4)) for how, t in found.items()}


def main() -> None:
    """Time the networks of all records and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--round-to", type=int, default=1, help="widths up to multiples of this")
    parser.add_argument("--by-rules", action="store_true", help="cuDNN does not try convolutions")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, rows = choose_device(arguments.device), []
    torch.backends.cudnn.benchmark = not arguments.by_rules
    for path in arguments.records:
        record = json.loads(path.read_text())
        network, units = record["settings"]["network"], record["result"]["units"]
        units = [-(-width // arguments.round_to) * arguments.round_to for width in units]
        dense, small = CifarExperiment(network=network).build().eval(), left_of(network, units)
        macs = [hc.count(model, torch.zeros(1, 3, 32, 32)).macs for model in (dense, small)]
        row: dict[str, Any] = {"run": path.parent.name, "units": units}
        row["MACs"] = round(macs[1] / macs[0], 4)
        for batch in arguments.batches:
            row[f"batch {batch}, ms dense and small"] = timed(dense, small, batch, device)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.out:
        chosen = "by rules" if arguments.by_rules else "by trying"
        record = {"environment": environment(device), "convolutions": chosen, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
