"""To be tested: gates on a transformer cost 2% of the time of a step and 3% of its memory.

A GPT-2-like language model with random weights, dense against gated, with learned gates and with
a budget: one that still has all units, and one that has closed an eighth of each group. Steps of
all models are timed in turn; what counts is the ratio of the medians. On a GPU the peak of
allocated memory is measured, with weights, gradients and the state of the optimizer. On a CPU it is
the sum of these and of all tensors that a forward saves for backward, each storage once, and times
are those of the process.

    python experiments/benchmarks/transformer_step.py [--device cuda] [--compiled] [--out FILE]

A device of cuda takes the model of 110M parameters, a CPU a smaller one of the same proportions.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).parents[1]))

import hardconcrete as hc
from benchmarks.importance_step import close_an_eighth
from hardconcrete.report import environment
from hardconcrete_paper.training.device import choose_device

STEPS = 100_000
"""Length that the budgets are given: nothing is cut while they are timed."""

GATES = ("dense", "learned", "budget", "budget, cut")
SIZES = {
    "cuda": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "batch": 8},
    "cpu": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5584, "batch": 4},
}
LENGTH = {"cuda": 1024, "cpu": 128}


class Training:
    """A model with its optimizer, ready to step."""

    def __init__(self, gates: str, a: Any, *, optimizer: str, compiled: bool, checkpointed: bool):
        torch.manual_seed(0)
        sizes = dict(SIZES[a.kind])
        batch = sizes.pop("batch")
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(**sizes, **dropout, **ends, n_positions=LENGTH[a.kind], use_cache=False)
        model: nn.Module = GPT2LMHeadModel(config).to(a.device).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.tokens = torch.randint(config.vocab_size, (batch, LENGTH[a.kind]), device=a.device)
        self.device, self.autocast = a.device, a.bf16
        self.penalty: Any = None
        if gates != "dense":
            model, self.penalty = _gated(model, gates, a.device)
        learning_rates = {"SGD": {"lr": 1e-3}, "AdamW": {"lr": 1e-4, "fused": a.kind == "cuda"}}
        kind: Any = getattr(torch.optim, optimizer)
        self.optimizer = kind(model.parameters(), **learning_rates[optimizer])
        self.model = model
        self.called: Any = torch.compile(model) if compiled else model

    def loss(self) -> Tensor:
        """A forward."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.called(input_ids=self.tokens, labels=self.tokens).loss
        return loss if self.penalty is None else loss + self.penalty()

    def step(self) -> None:
        """A training step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        if self.penalty is not None:
            self.penalty.step()

    def saved_bytes(self) -> int:
        """What a forward keeps for backward, with parameters, gradients and optimizer state."""
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

        parameters = [*self.model.parameters()]
        for each in parameters:
            note(each)
        fixed = sum(storages.values())  # gradients are as large
        for state in self.optimizer.state.values():
            fixed += sum(x.nbytes for x in state.values() if isinstance(x, Tensor))
        loss = self.loss()
        for tensor in _saved_by(loss):
            note(tensor)
        return fixed + sum(storages.values())


def _gated(model: nn.Module, gates: str, device: torch.device) -> tuple[hc.GatedModel, Any]:
    ids = torch.zeros(2, 16, dtype=torch.int64, device=device)
    gated = hc.attach_gates(model, (), {"input_ids": ids, "use_cache": False})
    if gates == "learned":
        return gated, hc.L0Penalty(gated, lam=1e-6)
    budget = hc.Budget(gated, macs=0.9, steps=STEPS)
    if gates == "budget, cut":
        close_an_eighth(gated, budget)
    return gated, budget


def _saved_by(loss: Tensor) -> list[Tensor]:
    """The tensors that the graph of a loss holds; of products that it recomputes, the factors."""
    found: list[Tensor] = []
    seen, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            names = [name for name in dir(node) if name.startswith("_raw_saved_")]
            saved = [getattr(node, name) for name in names] or [_saved_by_function(node)]
            found += [x for each in saved for x in _tensors_in(each)]
    return found


def _saved_by_function(node: Any) -> Any:
    """What a function written in Python, or compiled, has saved."""
    return getattr(node, "saved_tensors", ())


def _tensors_in(saved: Any) -> list[Tensor]:
    if isinstance(saved, list | tuple):
        return [x for each in saved for x in _tensors_in(each)]
    data = getattr(saved, "data", None) if not isinstance(saved, Tensor) else saved
    if isinstance(data, Tensor):
        return [data]
    return [*getattr(data, "factors", ())]


def peak_bytes(training: Training, others: int) -> int:
    """The memory of a step: on a GPU its peak, beside other models; else what is saved."""
    for _ in range(5):  # a budget measures in one of four steps; compiled code has two variants
        training.step()
    if training.device.type != "cuda":
        return training.saved_bytes()
    training.optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        training.step()
    peak = torch.cuda.max_memory_allocated() - others
    training.optimizer.zero_grad()
    return peak


def milliseconds(models: dict[str, Training], a: Any) -> dict[str, float]:
    """The median of a step of each model, in turn."""
    wait: Callable[[], None] = torch.cuda.synchronize if a.kind == "cuda" else lambda: None
    clock = time.perf_counter if a.kind == "cuda" else time.process_time  # others share a CPU
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(a.turns + 1):
        for name in [*models][:: -1 if turn % 2 else 1]:
            wait()
            start = clock()
            for _ in range(4):  # a budget measures in one of four steps
                models[name].step()
            wait()
            if turn:  # the first turn warms up
                times[name].append(250 * (clock() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def case(a: Any, **settings: Any) -> dict[str, Any]:
    """Time and memory of all models, against those of the dense one."""
    models: dict[str, Training] = {}
    memory: dict[str, int] = {}
    for name in GATES:
        gc.collect()
        others = torch.cuda.memory_allocated() if a.kind == "cuda" else 0
        models[name] = Training(name, a, **settings)
        memory[name] = peak_bytes(models[name], others)
    times = milliseconds(models, a)
    return {
        name: {
            "ms": round(times[name], 3),
            "time ratio": round(times[name] / times["dense"], 4),
            "MB": round(memory[name] / 1e6, 1),
            "memory ratio": round(memory[name] / memory["dense"], 4),
        }
        for name in GATES
    }


def main() -> None:
    """Measure every case and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--fp32", action="store_true", help="no autocast to bfloat16")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, with AdamW only")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    a.device = choose_device(a.device)
    a.kind, a.bf16 = a.device.type, not a.fp32
    torch.set_float32_matmul_precision("high")
    record: dict[str, Any] = {"environment": environment(a.device), "bf16 autocast": a.bf16}
    record |= {"model": SIZES[a.kind] | {"length": LENGTH[a.kind]}, "compiled": a.compiled}
    cases = [("AdamW", False)] if a.compiled else [("AdamW", False), ("SGD", False), ("SGD", True)]
    record["cases"] = []
    for optimizer, checkpointed in cases:
        settings = {"optimizer": optimizer, "checkpointed": checkpointed}
        record["cases"].append(settings | case(a, **settings, compiled=a.compiled))
        print(json.dumps(record["cases"][-1]), flush=True)
    if a.out:
        a.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
