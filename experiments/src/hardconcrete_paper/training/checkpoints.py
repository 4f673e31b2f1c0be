"""Train from the last checkpoint to the end of a run, or until its time is over."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.demo import status
from hardconcrete.errors import DataError, HardConcreteError
from hardconcrete_paper.training.background_writer import BackgroundWriter
from hardconcrete_paper.training.display import Sweep, SweepDisplay
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.processes import agreed, rank
from hardconcrete_paper.training.run_folder import RunFolder

CHECKPOINT_SECONDS = 15.0
"""Least time between two checkpoints. Slow ones are written less often."""

Facts = Callable[[nn.Module], dict[str, Any]]
"""More metrics of a network after an epoch."""


def train(
    engine: Engine,
    folder: RunFolder,
    sizes: Mapping[str, int],
    dense_macs: int,
    *,
    facts: Facts = lambda _: {},
    sweep: Sweep | None = None,
    minutes: float | None = None,
    began: float | None = None,
) -> bool:
    """Train with progress, metrics, snapshots and checkpoints; return whether the run is finished.

    Args:
        engine: what trains.
        folder: the files of the run. Of several processes the first one writes them.
        sizes: units of the dense network by group.
        dense_macs: its multiply-adds for one example.
        facts: more metrics of a network after an epoch.
        sweep: which of several runs this is.
        minutes: stop after so many, between two epochs, with a checkpoint.
        began: when the minutes began, by ``time.perf_counter``; by default now.
    """
    saved = time.perf_counter()
    began = saved if began is None else began
    load(engine, folder)
    patience, writes = CHECKPOINT_SECONDS, rank() == 0
    names = [learner.name for learner in engine.learners]
    shown = SweepDisplay(names, engine.epochs, dense_macs, sweep, silent=not writes)
    with shown as display, BackgroundWriter() as writer:
        for epoch in engine:
            models = [learner.averaged for learner in engine.learners]
            statuses = [
                status(model, loss, sizes, dense_macs)
                for model, loss in zip(models, engine.losses, strict=True)
            ]
            display.show(epoch, statuses)
            _refuse_nan(epoch, engine)
            over = minutes is not None and agreed(time.perf_counter() - began) > 60 * minutes
            if writes:
                for learner, model, now in zip(engine.learners, models, statuses, strict=True):
                    line = {"epoch": epoch, "seed": learner.seed, **asdict(now), **facts(model)}
                    folder.log({**line, "seconds": round(engine.seconds, 2)})
                if is_snapshot(epoch, engine.epochs):
                    _write_snapshots(engine, models, epoch, folder, writer)
                due = over or epoch in (1, engine.epochs)
                if due or time.perf_counter() - saved > patience:
                    start = time.perf_counter()
                    save = partial(folder.save, epoch=engine.done, seconds=engine.seconds)
                    writer.write(_state(engine), save)
                    saved = time.perf_counter()
                    patience = max(CHECKPOINT_SECONDS, 100 * (saved - start))
            if over and epoch < engine.epochs:
                return False
    return True


def _write_snapshots(
    engine: Engine, models: Sequence[Any], epoch: int, folder: RunFolder, writer: BackgroundWriter
) -> None:
    """Save the averaged networks of an epoch."""
    for learner, model in zip(engine.learners, models, strict=True):
        writer.write(model.state_dict(), partial(folder.snapshot, epoch, learner.seed))


def _refuse_nan(epoch: int, engine: Engine) -> None:
    """Stop a run whose loss or weights are not finite, before they are saved."""
    for learner, loss in zip(engine.learners, engine.losses, strict=True):
        weights = torch.stack([weight.isfinite().all() for weight in learner.model.parameters()])
        if not math.isfinite(loss) or not weights.all():
            raise HardConcreteError(
                f"{learner.name}: after epoch {epoch} the loss is {loss:.3g} and "
                f"{int((~weights).sum())} of {len(weights)} tensors of weights are no numbers, so "
                "the run stops; with these settings and this seed it would stop again"
            )


def forecast(learner: Learner, steps: int) -> str:
    """The warnings of ``check_run`` before the first step; empty if there are none.

    With a budget, the penalty adds the weight decay only.
    """
    recipe = learner.recipe
    penalty: Any = learner.budget or next(iter(learner.objective.penalties), None)
    if penalty is None:
        return ""
    moves_gates = learner.optimizers[-1 if recipe.gate_lr else 0]
    falls = None if recipe.gate_lr else lambda step: recipe.rate(step // steps) / recipe.lr
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hc.check_run(penalty, moves_gates, steps * recipe.epochs, falls)
    return " ".join(str(warning.message) for warning in caught)


def is_snapshot(epoch: int, epochs: int) -> bool:
    """Whether the averaged network of this epoch is saved, for curves.

    Example:
        >>> [epoch for epoch in range(1, 31) if is_snapshot(epoch, 25)]
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 25, 30]
    """
    return epoch <= 10 or epoch % 10 == 0 or epoch == epochs


def load(engine: Engine, folder: RunFolder) -> None:
    """Load the last checkpoint, if there is one."""
    checkpoint = folder.load()
    if checkpoint is None:
        return
    state, engine.done, engine.seconds = checkpoint
    if engine.done > engine.epochs:
        raise DataError(
            f"{folder.checkpoint} is of epoch {engine.done}, and this run has {engine.epochs} "
            "epochs; delete its folder to begin this run anew"
        )
    shrunk = False
    for learner in engine.learners:
        before = learner.gates
        learner.restore(_own(state, learner))
        learner.taken = engine.done * engine.steps
        shrunk = shrunk or learner.gates != before
    if shrunk:
        engine.build()


def fit(learners: Sequence[Learner], folder: RunFolder) -> bool:
    """Shrink networks to the size of their checkpoint, if any, before they are compiled."""
    checkpoint = folder.load()
    if checkpoint is None:
        return False
    for learner in learners:
        learner.shrink_as(_own(checkpoint[0], learner))
    return True


def _own(state: dict[str, Tensor], learner: Learner) -> dict[str, Tensor]:
    """The tensors of one network in a checkpoint."""
    prefix = f"seed{learner.seed}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _state(engine: Engine) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    return {
        f"seed{learner.seed}.{name}": tensor
        for learner in engine.learners
        for name, tensor in learner.state().items()
    }
