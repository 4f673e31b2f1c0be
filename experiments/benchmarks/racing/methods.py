"""The methods of the race: each makes a smaller network and trains it for the rest of its steps."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hardconcrete as hc
from benchmarks.racing import budgets
from benchmarks.racing.data import Data
from benchmarks.racing.networks import build, macs_by_weights, narrow, same_widths
from benchmarks.racing.settings import IMAGES, Outcome, Settings
from benchmarks.racing.train import error, train

ITERATIVE_STEPS = 400
"""Cuts in which torch-pruning would remove everything; as in its own benchmark on CIFAR."""

STEPS_PER_GRADIENT = 10
"""torch-pruning's gradients are taken anew after so many steps."""

PRUNE_FACTOR = 2
"""``hc.prune`` looks at so many times the images of torch-pruning's gradients, once in each of six
stages; those gradients are taken anew up to 40 times."""

Method = Callable[[nn.Module, Data, Settings], Outcome]
"""From the trained dense model, which stays as it is, the data and the settings."""


def batch_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What ``hc.prune`` measures importance with."""
    return F.cross_entropy(model(batch[0]), batch[1])


def recalibrated(model: nn.Module, data: Data) -> nn.Module:
    """A copy whose batch norms are estimated anew on training images."""
    model = copy.deepcopy(model).eval()
    hc.recalibrate(model, (images for images, _ in data.batches(IMAGES)))
    return model


def fine_tune(outcome: Outcome, data: Data, settings: Settings, steps: int) -> Outcome:
    """Training of what a method made, after its error without training is noted."""
    if not steps:
        outcome.more["error_as_pruned"] = error(outcome.model, data)
        outcome.more["error_recalibrated"] = error(recalibrated(outcome.model, data), data)
        return outcome
    recipe = settings.recipe(seed=1000, steps=steps)
    outcome.train_seconds += train(outcome.model, data, recipe, settings.checkpoint.without_file())
    return outcome


def ours(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
    """``hc.prune``, then ordinary training."""
    images = PRUNE_FACTOR * settings.images
    start, batches = time.perf_counter(), list(data.batches(images))
    more: dict[str, Any] = {"round_to": settings.round_to} if settings.round_to > 1 else {}
    small = hc.prune(
        copy.deepcopy(dense).eval(),
        data.example(),
        batches,
        batch_loss,
        macs=settings.target,
        examples=images,
        **more,
    )
    outcome = Outcome(small, time.perf_counter() - start)
    return fine_tune(outcome, data, settings, settings.steps)


def from_scratch(model: nn.Module, data: Data, settings: Settings) -> Outcome:
    """Ordinary training of a fresh network, which can be continued."""
    return Outcome(model, 0.0, train(model, data, settings.recipe(), settings.checkpoint))


def uniformly_narrow(dense: nn.Module, data: Data, settings: Settings) -> Outcome:  # noqa: ARG001
    """A narrow network from scratch."""
    model = narrow(
        settings.network, data.classes, settings.target, data.example(), settings.round_to
    )
    return from_scratch(model, data, settings)


def our_widths(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
    """A network with the widths that ``hc.prune`` chooses, from scratch."""
    pruned = ours(dense, data, replace(settings, steps=0)).model
    torch.manual_seed(settings.seed)
    again = replace(settings, checkpoint=settings.checkpoint.without_file())
    return from_scratch(same_widths(pruned), data, again)


def dense_from_scratch(dense: nn.Module, data: Data, settings: Settings) -> Outcome:  # noqa: ARG001
    """The dense network, for all the steps: what the others are compared with."""
    return from_scratch(build(settings.network, data.classes), data, settings)


def _pruner(
    model: nn.Module,
    data: Data,
    settings: Settings,
    importance: Any,
    kind: Any,
    global_pruning: bool = True,
) -> Any:
    """A pruner of torch-pruning that would remove everything in many small steps."""
    last = [
        m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == data.classes
    ]
    more = {"round_to": settings.round_to} if settings.round_to > 1 else {}
    return kind(
        model,
        data.example(),
        importance=importance,
        global_pruning=global_pruning,
        pruning_ratio=1.0,
        iterative_steps=ITERATIVE_STEPS,
        ignored_layers=last,
        **more,
    )


def _prune_to(
    target: float,
    model: nn.Module,
    pruner: Any,
    data: Data,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Small steps until the multiply-adds are below the target: as torch-pruning's benchmark.

    They are counted after each layer of a step, so that the last step removes no more than it must.
    """
    model.eval()
    count = macs_by_weights(model, data.example())
    dense = now = count()
    while now > target * dense:
        if pruner.current_step == pruner.iterative_steps:
            raise RuntimeError(f"all steps are done, at {now / dense:.3f} of the multiply-adds")
        before_step(pruner.current_step)
        for group in pruner.step(interactive=True):
            if not group[0].idxs:
                continue
            group.prune()
            now = count()
            if now <= target * dense:
                break


def _torch_pruning(importance: str, global_pruning: bool = True) -> Method:
    """A method of torch-pruning that prunes a trained model by an importance.

    Units of all layers are compared with each other, or only those of each layer.
    """

    def method(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
        import torch_pruning as tp

        start, model = time.perf_counter(), copy.deepcopy(dense).eval()
        measure = getattr(tp.importance, importance)()
        pruner = _pruner(model, data, settings, measure, tp.pruner.BasePruner, global_pruning)
        needs_gradients = isinstance(measure, tp.importance.GroupTaylorImportance)

        def gradients(step: int) -> None:
            if step % STEPS_PER_GRADIENT:
                return
            model.zero_grad()
            for batch in data.batches(settings.images, size=512):
                batch_loss(model, batch).backward()

        _prune_to(settings.target, model, pruner, data, gradients if needs_gradients else _nothing)
        model.zero_grad()
        outcome = Outcome(model, time.perf_counter() - start)
        return fine_tune(outcome, data, settings, settings.steps)

    return method


def _nothing(_: int) -> None:
    pass


def sparse_training(dense: nn.Module, data: Data, settings: Settings) -> Outcome:
    """torch-pruning's sparse training, then its group norm pruner, then ordinary training.

    As ``group_sl`` in its benchmark: scores by the largest of their group, no weight decay while
    the groups are made sparse, and as many steps after the cut as before it.
    """
    import torch_pruning as tp

    model = copy.deepcopy(dense)
    importance = tp.importance.GroupMagnitudeImportance(p=2, normalizer="max")

    def kind(*args: Any, **more: Any) -> Any:
        return tp.pruner.GroupNormPruner(*args, reg=settings.regularization, **more)

    pruner = _pruner(model, data, settings, importance, kind)
    steps = round(settings.sparse_part * settings.steps)
    seconds = train(
        model,
        data,
        settings.recipe(seed=2000, steps=steps, weight_decay=0.0),
        settings.checkpoint.without_file(),
        before_update=lambda: pruner.regularize(model),
    )
    start = time.perf_counter()
    _prune_to(settings.target, model, pruner, data)
    outcome = Outcome(model, time.perf_counter() - start, seconds)
    outcome.more |= {"regularization": settings.regularization, "sparse_steps": steps}
    return fine_tune(outcome, data, settings, settings.steps - steps)


METHODS: Mapping[str, Method] = {
    "ours": ours,
    "ours-budget": budgets.on_trained,
    "ours-gates": budgets.by_gates,
    "ours-scratch": budgets.from_scratch,
    "tp-magnitude": _torch_pruning("GroupMagnitudeImportance"),
    "tp-taylor": _torch_pruning("GroupTaylorImportance"),
    "tp-magnitude-local": _torch_pruning("GroupMagnitudeImportance", global_pruning=False),
    "tp-taylor-local": _torch_pruning("GroupTaylorImportance", global_pruning=False),
    "tp-reg": sparse_training,
    "random": _torch_pruning("RandomImportance"),
    "narrow": uniformly_narrow,
    "same-widths": our_widths,
    "dense": dense_from_scratch,
}

PEERS = tuple(name for name in METHODS if name.startswith("tp-") or name == "random")
"""Methods of torch-pruning; of their errors without training the better one counts."""

FROM_SCRATCH = ("ours-scratch", "narrow", "same-widths", "dense")
"""Methods that get the steps of the dense training, too."""

WITHOUT_DENSE = ("ours-scratch", "narrow", "dense")
"""Methods that need no trained model."""

RESUMABLE = ("ours-scratch", "ours-budget", "narrow", "dense")
"""Methods whose training continues from a checkpoint; the others start again."""

CELLS: Mapping[str, tuple[str, ...]] = {
    "none": ("ours", *(name for name in PEERS if name != "tp-reg")),
    "300": tuple(name for name in METHODS if name not in ("ours-scratch", "dense")),
    "half": tuple(name for name in METHODS if name not in FROM_SCRATCH),
    "scratch": FROM_SCRATCH,
}
"""By cell, the methods that can take part.

In ``none`` a trained model is pruned without training; in ``300`` some hundred steps follow, in
``half`` as many epochs as the dense training had; in ``scratch`` there is no dense training.
"""
