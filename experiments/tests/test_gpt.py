"""The comparison of transformers over characters runs, and each method keeps to the size."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpt
from hardconcrete_paper.data.shakespeare import Text


def test_every_method_reaches_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(4000) % 7
    monkeypatch.setattr(gpt, "load_shakespeare", lambda *_: Text(numbers, "abcdefg", "tiny"))
    monkeypatch.setitem(gpt.SIZES, "small", gpt.Size(2, 24, 6, context=8, lr=1e-2))
    monkeypatch.setattr(gpt, "BATCHES_TO_TEST", 2)
    monkeypatch.setattr(gpt, "BATCHES_TO_PRUNE", 4)
    out = tmp_path / "gpt.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--steps", "20", "--seeds", "0", "--out", str(out)])
    gpt.main()
    lines = {line["method"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert lines.keys() == set(gpt.METHODS)
    fractions = {method: line["macs_fraction"] for method, line in lines.items()}
    assert fractions.pop("dense") == 1.0
    assert all(0.4 < fraction <= 0.5 for fraction in fractions.values())
    assert lines["budget"]["same_text"]
    gpt.main()  # what has a line is not run again
    assert len(out.read_text().splitlines()) == len(lines)
