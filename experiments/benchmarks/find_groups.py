"""Claims: find_groups takes BERT-base on meta tensors in at most 5 s and 1 GB, and is linear.

With --llama: a causal model of 125M takes at most 5 s, one of 6.7B at most 60 s, and both at most
2 GB above the model, at any length. Each model in a process of its own, on 2 CPU cores; needs the
extra `hf`.

    python experiments/benchmarks/find_groups.py [--llama] [--out FILE]
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

DEPTHS = (3, 6, 12, 24, 48)
REPEATS = 3
LLAMAS: dict[str, dict[str, int]] = {
    "125M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4},
    "6.7B": {},
    "6.7B, grouped queries": {"num_key_value_heads": 8},
}  # fmt: skip
LENGTHS = (16, 2048, 16384)


def one(depth: int) -> dict[str, float]:
    """Seconds, peak memory, operators, groups and units of one BERT."""
    from transformers import BertConfig, BertModel

    import hardconcrete as hc

    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=depth))
        ids = torch.zeros(2, 128, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    hc.find_groups(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.zeros(2, 2))  # imports
    start = time.perf_counter()
    found = hc.find_groups(model, (), inputs)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    graph = torch.export.export(model, (), inputs, strict=False).module().graph
    return {
        "layers": depth,
        "operators": len(graph.nodes),
        "seconds": round(seconds, 2),
        "peak_gb": round(peak, 3),
        "groups": len(found),
        "units": sum(group.units for group in found),
    }


def one_llama(name: str, length: int) -> dict[str, Any]:
    """Seconds, and peak memory above what was in use before, of one causal model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hardconcrete as hc

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMAS[name]))
        ids = torch.zeros(2, length, dtype=torch.int64)
    hc.find_groups(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.zeros(2, 2))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter(), time.process_time()
    found = hc.find_groups(model, ids)
    seconds, of_cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    above = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "length": length,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(of_cpu, 2),
        "above_gb": round(above, 3),
        "groups": len(found),
        "units": sum(group.units for group in found),
    }


def draw(rows: list[dict[str, float]], out: Path) -> None:
    """Seconds over operators."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    axes.plot([r["operators"] for r in rows], [r["seconds"] for r in rows], "o-")
    for row in rows:
        axes.annotate(f"{row['layers']:.0f} layers", (row["operators"], row["seconds"]), fontsize=8,
                      xytext=(6, -10), textcoords="offset points")  # fmt: skip
    axes.set(xlabel="operators in the graph", ylabel="seconds", title="find_groups on BERT",
             xlim=(0, None), ylim=(0, None))  # fmt: skip
    figure.savefig(out.with_suffix(".png"), dpi=150)


def main() -> None:
    """Measure every depth and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--depth", type=int, help="only this one, as one line of JSON")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--llama", action="store_true", help="causal models at several lengths")
    parser.add_argument("--name", help="only this causal model, at --length")
    parser.add_argument("--length", type=int)
    arguments = parser.parse_args()
    if arguments.depth:
        print(json.dumps(one(arguments.depth)))
        return
    if arguments.name:
        print(json.dumps(one_llama(arguments.name, arguments.length)))
        return
    settings = [["--depth", str(depth)] for depth in DEPTHS]
    if arguments.llama:
        settings = [["--name", name, "--length", str(n)] for name in LLAMAS for n in LENGTHS]
    rows = []
    for options in settings:
        command = [sys.executable, __file__, *options]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(arguments.repeats)
        ]
        rows.append({**runs[0], "seconds": statistics.median(run["seconds"] for run in runs)})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        record = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "by_length" if arguments.llama else "by_depth": rows,
        }
        if not arguments.llama:
            record["bert_base"] = next(row for row in rows if row["layers"] == 12)
            draw(rows, arguments.out)
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
