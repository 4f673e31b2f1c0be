"""Claim: with the same defaults, the delivered cost ends within 5% of the budget on four networks.

An MLP and LeNet-5 on MNIST, ResNet-20 on CIFAR-10 (multiply-adds), and a character-level
transformer (width of its feed-forward layers), at half, a quarter and a tenth. Then each is
compacted, never above its budget, and tested. The dense networks are trained alike.

    python experiments/benchmarks/budgets.py [--only mlp lenet5] [--budgets 0.5] [--out FILE]

An existing record is extended. A network that is trained again replaces its earlier run.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.demo.data import load_mnist
from hardconcrete.objective import LearnedBudget
from hardconcrete.report import BLUE, GREEN, VERMILION, environment, save_figure
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.data.cifar import load_cifar
from hardconcrete_paper.data.shakespeare import load_shakespeare
from hardconcrete_paper.models import CharTransformer, LeNet5, ResNet
from hardconcrete_paper.training.device import choose_device

BUDGETS = (0.5, 0.25, 0.1)
LR, GATE_LR = 1e-3, 1e-2
TRAJECTORY_POINTS = 200
"""Points that are recorded of each training."""


@dataclass(frozen=True)
class Task:
    """A network, its data and its budget.

    Args:
        build: the dense network.
        example: an input for the gates.
        batch: inputs and targets for a step, drawn on the device.
        test: inputs and targets of the test set, in batches.
        steps: length of the training.
        cost: the limited cost.
    """

    build: Callable[[], nn.Module]
    example: Tensor
    batch: Callable[[], tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]
    steps: int
    cost: str = "macs"

    def error(self, model: nn.Module) -> float:
        """Percentage of wrong answers on the test set."""
        model.eval()
        with torch.no_grad():
            wrong = [
                (_scores(model(x)).argmax(1) != y.flatten()).float().mean() for x, y in self.test
            ]
        return round(100 * torch.stack(wrong).mean().item(), 3)


def _scores(outputs: Tensor) -> Tensor:
    return outputs.flatten(0, -2)


def mnist(build: Callable[[], nn.Module], steps: int, data: Path | None, device: Any) -> Task:
    """Handwritten digits, in batches of 100."""
    sets = {}
    for split in ("train", "test"):
        found = load_mnist(split, data)
        sets[split] = found.images.to(device).float().div_(255), found.labels.to(device)
    images, labels = sets["train"]

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(labels), (100,), device=device)
        return images[rows], labels[rows]

    test = list(zip(*(part.split(1000) for part in sets["test"]), strict=True))
    return Task(build, images[:1], batch, test, steps)


def cifar(steps: int, data: Path | None, device: Any) -> Task:
    """CIFAR-10, cropped and mirrored, in batches of 128."""
    prepare = Preparation(CIFAR_STATISTICS[10]).to(device)
    found = load_cifar(10, "train", data)
    images, labels = found.images.to(device), found.labels.to(device)

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(labels), (128,), device=device)
        return prepare(images[rows]), labels[rows]

    found = load_cifar(10, "test", data)
    plain = copy.deepcopy(prepare).eval()
    test = [
        (plain(x.to(device)), y.to(device))
        for x, y in zip(found.images.split(1000), found.labels.split(1000), strict=True)
    ]
    return Task(lambda: ResNet(20), test[0][0][:1], batch, test, steps)


def characters(steps: int, data: Path | None, device: Any) -> Task:
    """Tiny Shakespeare, 64 pieces of 128 characters."""
    text, rest = load_shakespeare("train", data), load_shakespeare("test", data)
    text, rest = (
        type(each)(each.numbers.to(device), each.alphabet, each.name) for each in (text, rest)
    )

    def batch() -> tuple[Tensor, Tensor]:
        return text.windows(torch.randint(len(text) - 128, (64,), device=device), 128)

    starts = torch.arange(0, len(rest) - 128, 128, device=device)
    test = [rest.windows(part, 128) for part in starts.split(109)]
    example = test[0][0][:1]
    return Task(lambda: CharTransformer(len(text.alphabet)), example, batch, test, steps, "units")


TASKS: dict[str, Callable[[Path | None, Any], Task]] = {
    "mlp": lambda data, device: mnist(MLP, 12_000, data, device),
    "lenet5": lambda data, device: mnist(LeNet5, 12_000, data, device),
    "resnet20": lambda data, device: cifar(16_000, data, device),
    "characters": lambda data, device: characters(5_000, data, device),
}


def train(
    task: Task,
    fraction: float | None,
    seed: int,
    device: torch.device,
    kind: type[LearnedBudget] = LearnedBudget,
    droprate: float = 0.5,
) -> dict[str, Any]:
    """Train to a budget, or densely without one, and measure the result."""
    torch.manual_seed(seed)
    model = task.build().to(device)
    start = time.perf_counter()
    if fraction is None:
        _loop(task, model, [{"params": [*model.parameters()], "lr": LR}], None, device)
        error = task.error(model)
        return {"budget": 1.0, "error": error, "seconds": round(time.perf_counter() - start, 1)}
    gated = hc.attach_gates(model, task.example, droprate=droprate)
    limits: dict[str, Any] = {task.cost: fraction}
    budget = kind(gated, steps=task.steps, **limits)
    groups = hc.parameter_groups(gated, LR, GATE_LR)
    path = _loop(task, gated, groups, budget, device)
    seconds = time.perf_counter() - start
    batches = [task.batch()[0] for _ in range(50)]
    hc.recalibrate(gated, batches)
    small = hc.compact(gated, budget=budget)
    hc.recalibrate(small, batches)  # other units than the readout's may be open
    (delivered,) = budget.delivered().values()
    counted = hc.count(small, task.example), hc.count(task.build(), task.example.cpu())
    kept = hc.CompactionPlan.of(small).groups.values()
    width = sum(len(each.kept) for each in kept) / sum(each.units for each in kept)
    return {
        "budget": fraction,
        "droprate": droprate,
        "delivered": round(delivered, 5),
        "off": round(delivered / fraction - 1, 4),
        "compacted": round(width if task.cost == "units" else counted[0].macs / counted[1].macs, 5),
        "error": task.error(gated),
        "compacted_error": task.error(small),
        "seconds": round(seconds, 1),
        "path": path,
    }


def _loop(
    task: Task, model: nn.Module, groups: list[dict[str, Any]], budget: Any, device: torch.device
) -> list[list[float]]:
    """The training loop; on a GPU the step is one replayed graph. Weights anneal, gates do not."""
    for group in groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(groups, fused=True, capturable=on_gpu)
    rate = optimizer.param_groups[0]["lr"]
    path: list[list[float]] = []

    def step() -> None:
        x, y = task.batch()
        loss = F.cross_entropy(_scores(model(x)), y.flatten())
        if budget is not None:
            loss = loss + budget()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if budget is not None:
            budget.step()

    model.train()
    done = 0
    replay = step
    if on_gpu:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        replay, done = graph.replay, 4
    for k in range(done, task.steps):
        if k % 50 == 0:
            rate.fill_(0.5 * LR * (1 + math.cos(math.pi * k / task.steps)))
        replay()
        if budget is not None and (
            k % max(1, task.steps // TRAJECTORY_POINTS) == 0 or k == task.steps - 1
        ):
            (delivered,), (expected,) = budget.delivered().values(), budget.expected().values()
            scale, (price,) = budget.state_dict()["log_scale"].exp().item(), budget.price().values()
            path.append([k + 1, *(round(x, 6) for x in (delivered, expected, scale, price))])
    return path


def draw(runs: list[dict[str, Any]], out: Path) -> tuple[Path, Path]:
    """Costs and their multipliers over training, a panel for each network."""
    names = list(dict.fromkeys(run["network"] for run in runs))

    def on(figure: Any) -> None:
        panels = figure.subplots(2, len(names), squeeze=False, sharex="col")
        for name, costs, prices in zip(names, *panels, strict=True):
            own = [run for run in runs if run["network"] == name and run.get("droprate") == 0.5]
            for run, colour in zip(own, (BLUE, VERMILION, GREEN), strict=False):
                steps, delivered, expected, scale, price = zip(*run["path"], strict=True)
                label = f"{run['budget']:.0%}: {run['off']:+.1%}"
                costs.plot(steps, delivered, "-", color=colour, label=label)
                costs.plot(steps, expected, ":", color=colour)
                costs.axhline(run["budget"], color=colour, linewidth=0.5)
                prices.plot(steps, price, "-", color=colour)
                prices.plot(steps, scale, ":", color=colour)
            costs.set(title=name, yscale="log")
            costs.locator_params(axis="x", nbins=4)
            costs.legend(title="budget: delivered against it", fontsize=7, title_fontsize=7)
            prices.set_yscale("symlog", linthresh=0.01)
            prices.axhline(0, color="black", linewidth=0.5)
            prices.set_xlabel("step")
        panels[0][0].set_ylabel("cost: delivered (line), expected (dots)")
        panels[1][0].set_ylabel("multiplier (line), its scale (dots)")

    return save_figure(on, out, "budgets", (3.6 * len(names), 6))


def main() -> None:
    """Train everything and print, and perhaps write and draw, the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, *BUDGETS], help="1: dense")
    parser.add_argument("--droprate", type=float, default=0.5, help="of the gates at the start")
    parser.add_argument("--steps", type=int, help="instead of each network's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    out, seed = arguments.out, arguments.seed
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out and out.exists() else []
    for name in arguments.only:
        task = TASKS[name](arguments.data, device)
        if arguments.steps:
            task = replace(task, steps=arguments.steps)
        for fraction in arguments.budgets:
            limit = None if fraction == 1 else fraction
            found = train(task, limit, seed, device, droprate=arguments.droprate)
            about = {"network": name, "seed": seed, "steps": task.steps, "cost": task.cost}
            found = {**about, **found, "environment": environment(device)}
            print({key: value for key, value in found.items() if key != "path"}, flush=True)
            runs = [run for run in runs if _which(run) != _which(found)] + [found]
            if out:
                out.write_text(json.dumps({"runs": runs}) + "\n")
    if out:
        draw(sorted(runs, key=lambda run: [*TASKS].index(run["network"])), out.parent)


def _which(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run.get(key) for key in ("network", "budget", "droprate", "seed"))


if __name__ == "__main__":
    main()
