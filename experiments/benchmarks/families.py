"""Claim: at least 50 Hugging Face families are pruned exactly, most in their own class, none wrong.

Each family is a tiny model from its configuration with random weights. It gets random gates and is
compacted; then half of its units are closed, equally many in all layers, and the result is written
by ``save_pretrained`` and opened by ``from_pretrained``. Needs the extra `hf`; five minutes on one
core.

    PYTHONPATH=. python experiments/benchmarks/families.py [--out FILE] [--only NAME ...]
"""

import argparse
import copy
import json
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

import hardconcrete as hc
from hardconcrete.report import environment
from tests.exactness import apart, at_random, outputs
from tests.zoo.huggingface import FAMILIES, Family

WRITTEN_TOKENS = 12


def record(family: Family) -> dict[str, Any]:
    """What works for one family."""
    started = time.perf_counter()
    found = hc.find_groups(family.build(), *family.inputs(2))
    units: dict[str, list[int]] = {}
    for group in found:
        units.setdefault(group.kind, []).append(group.units)
    heads = [group.name for group in found if group.kind == "attention head"]
    gated = gated_model(family)
    small: Any = hc.compact(gated)
    plan = hc.CompactionPlan.of(small)
    row = {
        "family": family.name,
        "model": family.model,
        "units": units,
        "form": plan.form,
        "same_class": type(small) is type(gated.model),
        "difference": max(difference(family, gated, small, rows) for rows in (2, 5)),
        "generates_the_same": generates_the_same(family, gated, small, plan.form),
        "heads_and_widths": from_pretrained(family, ()) if heads else None,
        "widths": from_pretrained(family, heads) if len(heads) < len(found) else None,
    }
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def gated_model(family: Family, exclude: Any = ()) -> hc.GatedModel:
    """The model with random gates, in evaluation mode."""
    torch.manual_seed(0)
    gated = at_random(hc.attach_gates(family.build(), *family.inputs(2), exclude=exclude)).eval()
    gated.freeze_gates()
    return gated


def difference(family: Family, first: Any, second: Any, rows: int) -> float:
    """The largest difference of two models' outputs, relative to their scale."""
    inputs = family.inputs(rows)
    return apart(outputs(first.eval(), inputs), outputs(second.eval(), inputs))


def generates_the_same(family: Family, gated: Any, small: Any, form: str) -> bool | None:
    """Whether both models write the same text with a cache; None where one writes none."""
    prompt = family.prompt(2)
    if not prompt or form == "graph":
        return None
    lengths = {"max_new_tokens": WRITTEN_TOKENS, "min_new_tokens": WRITTEN_TOKENS}
    texts = [
        model.generate(**copy.deepcopy(prompt), **lengths, do_sample=False)
        for model in (gated.model, small)
    ]
    return torch.equal(*texts)


def from_pretrained(family: Family, exclude: Any) -> dict[str, Any]:
    """The uniform small model: its form, its configuration, and what the stock class opens."""
    gated = gated_model(family, exclude)
    small: Any = hc.compact(gated, budget=hc.Budget(gated, units=0.5, uniform=True, by="gates"))
    plan = hc.CompactionPlan.of(small)
    numbers = {name: dict(c.numbers) for name, c in plan.configurations.items()}
    row = {"form": plan.form, "numbers": numbers, "opens": False}
    if plan.form == "graph":
        return row
    with tempfile.TemporaryDirectory() as folder:
        try:
            small.save_pretrained(folder)
        except hc.HardConcreteError as error:
            return {**row, "refused": str(error)}
        opened = type(small).from_pretrained(folder, dtype=family.dtype)
    return {**row, "opens": True, "difference": difference(family, small, opened, 3)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| family | units | form | difference | generates the same | opened by from_pretrained |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kinds = ", ".join(f"{sum(counts)} {kind}s" for kind, counts in row["units"].items())
        opens = [
            words
            for name, words in (("heads_and_widths", "heads and widths"), ("widths", "widths"))
            if row[name] and row[name]["opens"]
        ]
        same = {True: "yes", False: "**no**", None: ""}[row["generates_the_same"]]
        cells = (
            row["family"], kinds, row["form"], f"{row['difference']:.0e}", same,
            opens[0] if opens else "no",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Try all families and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for family in FAMILIES:
        if not arguments.only or family.name in arguments.only:
            rows.append(record(family))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if arguments.out:
        summary = {
            "environment": environment(torch.device("cpu")),
            "transformers": transformers.__version__,
            "forms": Counter(row["form"] for row in rows),
            "families": rows,
        }
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
