"""Claim: compacting a 110M GPT-2-like model takes at most twice the model's memory above it.

Each step in a process of its own, on CPU cores; needs the extra `hf` and Linux.

    python experiments/benchmarks/compact_memory.py [--out FILE]
"""

import argparse
import gc
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

STEPS = ("find_groups", "attach_gates", "compact", "compact, graph", "prune")
TOKENS = 128


def model_and_inputs() -> tuple[Any, dict[str, torch.Tensor]]:
    """GPT-2 with random weights, and two rows of tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = torch.randint(0, 50257, (2, TOKENS))
    return GPT2LMHeadModel(GPT2Config()).eval(), {"input_ids": ids}


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Of the next token."""
    return model(**batch, labels=batch["input_ids"]).loss  # type: ignore[no-any-return]


def step(name: str) -> tuple[Callable[[], Any], Any]:
    """What is measured, and what it works on."""
    import hardconcrete as hc

    model, inputs = model_and_inputs()
    if name == "find_groups":
        return lambda: hc.find_groups(model, inputs), model
    if name == "attach_gates":
        return lambda: hc.attach_gates(model, inputs), model
    if name == "prune":
        return lambda: hc.prune(model, inputs, [inputs] * 4, loss, macs=0.5, stages=2), model
    gated = hc.attach_gates(model, inputs).eval()
    gated.gates.log_alpha.data.normal_(0, 3)
    form: Any = "graph" if "graph" in name else "module"
    return lambda: hc.compact(gated, form=form), model


def memory(field: str) -> float:
    """A line of /proc/self/status in GB, such as VmRSS, and VmHWM for its peak."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024 / 1e9  # type: ignore[index]


def measured(name: str) -> dict[str, Any]:
    """Seconds, and the peak of memory above what was in use before, in sizes of the model."""
    import hardconcrete as hc

    hc.compact(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
               torch.zeros(2, 2), keep={"0": [0]}, form="graph")  # fmt: skip  # imports
    run, model = step(name)
    gc.collect()
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, start = memory("VmRSS"), time.perf_counter()
    result = run()
    seconds, above = time.perf_counter() - start, memory("VmHWM") - before
    return {
        "step": name,
        "result": type(result).__name__,
        "model_gb": round(size, 3),
        "above_gb": round(above, 3),
        "models": round(above / size, 2),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measure every step and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", help="only this one, as one line of JSON")
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(measured(arguments.step)))
        return
    rows = []
    for name in STEPS:
        command = [sys.executable, __file__, "--step", name]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        record = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "model": f"GPT-2 of 124M parameters, 2 rows of {TOKENS} tokens",
            "steps": rows,
        }
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
