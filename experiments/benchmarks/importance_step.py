"""What measuring importance costs: a training step under a budget against a dense one.

The same network, optimizer and batch; steps of both are timed in turn, eager and compiled. The
budget is in its first phase, in which it measures in every fourth step: once with all units, once
with an eighth of each group closed.

    python experiments/benchmarks/importance_step.py [--network wrn-28-10] [--out FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.report import environment
from hardconcrete_paper.cifar.experiment import CifarExperiment
from hardconcrete_paper.training.device import choose_device

STEPS = 100_000
"""Length that the budget is given: nothing is cut while it is timed."""


def stepper(
    model: nn.Module, budget: hc.Budget | None, compiled: bool, batch: int
) -> Callable[[], None]:
    """One training step."""
    device = next(model.parameters()).device
    images = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    called: Any = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(called(images), labels)
        loss = loss if budget is None else loss + budget()
        loss.backward()
        optimizer.step()
        if budget is not None:
            budget.step()

    return step


def close_an_eighth(gated: hc.GatedModel, budget: hc.Budget) -> None:
    """Close an eighth of each group, as a budget that is on its way."""
    state = budget.state_dict()
    for group in gated.groups:
        state["open"][group.slice][: max(group.units // 8, 1)] = False
    budget.load_state_dict(state)


def timed(
    steps: dict[str, Callable[[], None]], wait: Callable[[], None], a: Any
) -> dict[str, float]:
    """Median milliseconds of a step of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(a.turns + 1):
        for name in [*steps][:: -1 if turn % 2 else 1]:
            wait()
            start = time.perf_counter()
            for _ in range(a.steps):
                steps[name]()
            wait()
            if turn:  # the first turn compiles
                times[name].append(1000 * (time.perf_counter() - start) / a.steps)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def main() -> None:
    """Time both and print, and perhaps write, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="wrn-28-10")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    device = choose_device(a.device)
    torch.backends.cudnn.benchmark = True
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    record: dict[str, Any] = {"environment": environment(device), **vars(a), "out": None}
    for compiled in (False, True):
        torch.manual_seed(0)
        made = [CifarExperiment(network=a.network).build().to(device) for _ in range(3)]
        made = [model.to(memory_format=torch.channels_last) for model in made]
        steps = {"dense": stepper(made[0], None, compiled, a.batch)}
        for name, model in zip(("budget", "budget, cut"), made[1:], strict=True):
            gated = hc.attach_gates(model, torch.zeros(2, 3, 32, 32, device=device))
            budget = hc.Budget(gated, macs=0.5, steps=STEPS)
            if name == "budget, cut":
                close_an_eighth(gated, budget)
            steps[name] = stepper(gated, budget, compiled, a.batch)
        found = timed(steps, wait, a)
        ratios = {
            "ratio": round(found["budget"] / found["dense"], 4),
            "ratio, cut": round(found["budget, cut"] / found["dense"], 4),
        }
        record["compiled" if compiled else "eager"] = found | ratios
    print(json.dumps(record, indent=2))
    if a.out:
        a.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
