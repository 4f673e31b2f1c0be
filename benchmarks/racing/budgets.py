"""Methods of the race that close units while they train, by importance or by learned gates."""

import copy
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardconcrete as hc
from benchmarks.racing.data import Data
from benchmarks.racing.networks import build
from benchmarks.racing.settings import IMAGES, Outcome, Settings
from benchmarks.racing.train import Trainer

GATE_LR = 5e-3
"""Rate of Adam for learned gates, outside the schedule of the weights."""

DROPRATE = 0.1
"""Learned gates start nearly open."""


def on_trained(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
    """A budget by importance, on a trained model."""
    return _by_importance(copy.deepcopy(dense), data, settings)


def from_scratch(dense: nn.Module, data: Data, settings: Settings) -> Outcome:  # noqa: ARG001
    """A budget by importance, on a fresh model."""
    return _by_importance(build(settings.network, data.classes), data, settings)


def _by_importance(model: nn.Module, data: Data, settings: Settings) -> Outcome:
    start = time.perf_counter()
    gated = hc.attach_gates(model.to(data.device), data.example())
    budget = hc.Budget(
        gated, macs=settings.target, steps=settings.steps, round_to=settings.round_to,
        measure_every=1,  # steps are replayed
    )  # fmt: skip
    trainer = Trainer(
        gated, data, settings.steps, settings.peak_lr, seed=settings.seed + 1000,
        after_step=lambda _: budget.step(),
    )  # fmt: skip
    settles: int = budget.steps_to_settle  # type: ignore[attr-defined]
    trainer.run(until=settles)
    trainer.recapture()
    hc.shrink(gated, trainer.optimizer, below="readout", pays=0.0)
    trainer.run()
    trainer.finish()
    small = hc.compact(gated, budget=budget)
    return Outcome(small, train_seconds=time.perf_counter() - start)


def by_gates(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
    """A budget with the paper's gates, which learn; Adam moves them at a rate of its own."""
    start = time.perf_counter()
    model = copy.deepcopy(dense).to(data.device)
    gated = hc.attach_gates(model, data.example(), droprate=DROPRATE)
    budget = hc.Budget(gated, macs=settings.target, steps=settings.steps, by="gates")
    on_gpu = data.device.type == "cuda"
    mover = torch.optim.Adam([gated.gates.log_alpha], lr=GATE_LR, capturable=on_gpu)

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels) + budget()

    def after_step(_: int) -> None:
        mover.step()
        mover.zero_grad(set_to_none=False)  # in place: a captured step adds to it
        budget.step()

    trainer = Trainer(
        gated, data, settings.steps, settings.peak_lr, seed=settings.seed + 1000, loss=loss,
        after_step=after_step, parameters=list(gated.model.parameters()),
    )  # fmt: skip
    trainer.run()
    trainer.finish()
    small = hc.compact(gated, budget=budget, round_to=settings.round_to)
    hc.recalibrate(small, (images for images, _ in data.batches(IMAGES)))
    return Outcome(small, train_seconds=time.perf_counter() - start)
