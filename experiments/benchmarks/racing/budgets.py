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
from hardconcrete.objective import DESCENT_END, DESCENT_START

GATE_LR = 5e-3
"""Rate of Adam for learned gates, outside the schedule of the weights."""

DROPRATE = 0.1
"""Learned gates start nearly open."""

MAX_SHRINKS = 4
"""How often units are taken out of the tensors, the time when the budget has settled included."""

LEAST_SAVING = 0.2
"""The part of the present MACs that units must have, to be taken out before that."""

STEPS_TO_CAPTURE = 300
"""What it costs to shrink and to capture a step anew, in steps of the dense network."""

STEPS_TO_COMPILE = 3000
"""The same where the step is compiled."""

CLOCK = 0.5
"""The part of the MACs saved that the clock sees."""


def on_trained(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
    """A budget by importance, on a trained model."""
    return _by_importance(copy.deepcopy(dense), data, settings)


def from_scratch(dense: nn.Module, data: Data, settings: Settings) -> Outcome:  # noqa: ARG001
    """A budget by importance, on a fresh model."""
    return _by_importance(build(settings.network, data.classes), data, settings)


def shrinks(target: float, coming_down: int, cost: int) -> int:
    """How often to take units out while a budget comes down, so that most time is saved.

    The target falls by the same factor in every step. Between two shrinks it falls by
    ``LEAST_SAVING`` at least.

    Args:
        target: the fraction of the MACs at the end.
        coming_down: steps in which the target falls.
        cost: of each shrink, in steps of the dense network.
    """

    def gain(number: int) -> float:
        saved = sum(1 - target ** (done / number) for done in range(1, number))
        return CLOCK * coming_down / number * saved - (number - 1) * cost

    worth = [n for n in range(2, MAX_SHRINKS + 1) if target ** (1 / n) <= 1 - LEAST_SAVING]
    return max([1, *worth], key=gain)


def _by_importance(model: nn.Module, data: Data, settings: Settings) -> Outcome:
    start = time.perf_counter()
    gated = hc.attach_gates(model.to(data.device), data.example())
    budget = hc.Budget(
        gated, macs=settings.target, steps=settings.steps, round_to=settings.round_to,
        measure_every=1,  # steps are replayed
    )  # fmt: skip
    settles: int = budget.steps_to_settle  # type: ignore[attr-defined]
    preparing = time.perf_counter() - start
    recipe = settings.recipe(seed=1000)
    trainer = Trainer(gated, data, recipe, budget=budget, checkpoint=settings.checkpoint)
    coming_down = round((DESCENT_END - DESCENT_START) * settings.steps)
    cost = STEPS_TO_COMPILE if settings.compiled else STEPS_TO_CAPTURE
    number = shrinks(settings.target, coming_down, cost)
    done = []
    for left in reversed(range(number)):
        stop = settles - left * coming_down // number
        if trainer.done > stop:  # it was continued from a later checkpoint
            continue
        trainer.run(until=stop)
        trainer.finish()
        pays = LEAST_SAVING / 2 if left else 0.0  # cuts lag a little behind the target
        done.append(str(hc.shrink(gated, trainer.optimizer, below="readout", pays=pays)))
        trainer.recapture()
    trainer.run()
    trainer.finish()
    small = hc.compact(gated, budget=budget)
    more = {"shrinks": [words.splitlines()[0] for words in done]}
    return Outcome(small, train_seconds=preparing + trainer.seconds(), more=more)


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
        gated, data, settings.recipe(seed=1000), loss=loss, after_step=after_step,
        parameters=list(gated.model.parameters()), checkpoint=settings.checkpoint.without_file(),
    )  # fmt: skip
    trainer.run()
    trainer.finish()
    small = hc.compact(gated, budget=budget, round_to=settings.round_to)
    hc.recalibrate(small, (images for images, _ in data.batches(IMAGES)))
    return Outcome(small, train_seconds=time.perf_counter() - start)
