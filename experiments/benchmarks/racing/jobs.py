"""One run of the race: a job, what it needs, and the line it leaves."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hardconcrete as hc
from benchmarks.racing.checkpoint import Checkpoint
from benchmarks.racing.data import Data
from benchmarks.racing.methods import (
    CELLS,
    FROM_SCRATCH,
    METHODS,
    PEERS,
    RESUMABLE,
    WITHOUT_DENSE,
)
from benchmarks.racing.networks import build, sizes
from benchmarks.racing.settings import Recipe, Settings, optimizer_of
from benchmarks.racing.train import BATCH, error, train
from hardconcrete.report import environment

DENSE = "dense"
"""The cell of the trained models that others prune."""

SMOKE_IMAGES = 32
"""Images to prune with in a smoke test."""

SMOKE_STEPS = 4
"""Steps in place of an epoch in a smoke test."""


@dataclass(frozen=True)
class Job:
    """One line of the results.

    Args:
        network: its name.
        dataset: likewise.
        cell: one of ``CELLS``, or ``"dense"``.
        method: one of ``METHODS``.
        target: the fraction of the dense multiply-adds to keep.
        seed: of everything that is drawn.
        peak_lr: of the training that belongs to the method.
        dense_lr: of the dense training before it.
        epochs: in all.
        dense_epochs: of them, those of the dense training.
        steps: after the dense training, in the cell ``300``.
        validate: tested on held-out training images.
        smoke: a few steps on a few images.
        round_to: widths are multiples of this.
        regularization: strength of torch-pruning's sparse training.
        schedule: of the rate in every training, one of ``SCHEDULES``.
        compiled: whether ``torch.compile`` makes the forward and backward pass.
    """

    network: str
    dataset: str
    cell: str
    method: str
    target: float
    seed: int
    peak_lr: float
    dense_lr: float
    epochs: int
    dense_epochs: int
    steps: int
    validate: bool
    smoke: bool
    round_to: int
    regularization: float
    schedule: str = "one-cycle"
    compiled: bool = False

    @property
    def needs_dense(self) -> bool:
        """Whether it waits for the trained model of its seed."""
        return self.cell != DENSE and self.method not in WITHOUT_DENSE

    @property
    def resumable(self) -> bool:
        """Whether its training continues from a checkpoint."""
        return self.cell == DENSE or self.method in RESUMABLE

    def work(self, per_epoch: int = 390) -> int:
        """Steps of training."""
        per_epoch = SMOKE_STEPS if self.smoke else per_epoch
        steps = min(self.steps, SMOKE_STEPS) if self.smoke else self.steps
        before = self.dense_epochs * per_epoch
        after = {
            "none": 0,
            "300": steps,
            "half": self.epochs * per_epoch - before,
            "scratch": self.epochs * per_epoch - before,
            DENSE: 0,
        }[self.cell]
        return after + (before if self.cell == DENSE or self.method in FROM_SCRATCH else 0)

    def name(self) -> str:
        """Of the file of results."""
        ending = "-held-out" if self.validate else ""
        return f"{self.network}-{self.dataset}{ending}{'-smoke' if self.smoke else ''}"

    def dense_file(self, work: Path) -> Path:
        """Where the trained model is kept."""
        how = f"{self.dense_epochs}-{self.dense_lr}-{self.seed}"
        how += "-step" if self.schedule == "step" else ""
        return work / f"dense-{self.name()}-{how}.pt"

    def checkpoint_file(self, work: Path) -> Path:
        """Where its training continues from."""
        text = json.dumps(asdict(self), sort_keys=True)
        mark = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = f"{self.cell}-{self.method}-{self.target}-{self.seed}-{mark}"
        return work / f"checkpoint-{self.name()}-{words}.pt"

    @classmethod
    def key_of(cls, line: Mapping[str, Any]) -> tuple[Any, ...]:
        """What tells the job of a line from others; older lines lack what has a default."""
        own = {field.name: field.default for field in fields(cls)}
        return tuple(line.get(name, default) for name, default in own.items())


def run_job(job: Job, data: Data, work: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Train, prune, test: the line of a job."""
    torch.manual_seed(job.seed)
    per_epoch = len(data) // min(BATCH, len(data))
    steps = job.work(per_epoch)
    if job.cell == DENSE:
        model, more = _train_dense(job, data, steps, work, checkpoint), dict[str, Any]()
        more["error"] = error(model, data)
    else:
        model, more = _run_method(job, data, steps, work, checkpoint)
    tested = "held-out training" if job.validate else "test"
    dense = hc.count(build(job.network, data.classes), data.example().cpu())
    small = hc.count(model, data.example())
    return {
        **asdict(job),
        **more,
        "macs": small.macs,
        "macs_fraction": round(small.macs / dense.macs, 5),
        "params": small.params,
        "params_fraction": round(small.params / dense.params, 5),
        "method_steps": steps,
        "seconds": round(checkpoint.seconds(), 2),
        "pieces": checkpoint.pieces,
        "widths": sizes(model),
        "latency": None,
        "tested_on": f"{len(data.test_labels)} {tested} images",
        **_environment(data.device),
    }


def _train_dense(job: Job, data: Data, steps: int, work: Path, checkpoint: Checkpoint) -> nn.Module:
    model = build(job.network, data.classes)
    recipe = Recipe(
        steps, job.dense_lr, job.seed, job.schedule, job.compiled,
        optimizer=optimizer_of(job.network),
    )  # fmt: skip
    train(model, data, recipe, checkpoint)
    file = job.dense_file(work)
    draft = file.with_suffix(".draft")
    torch.save({"state": model.state_dict(), "error": error(model, data)}, draft)
    draft.replace(file)
    return model


def _run_method(
    job: Job, data: Data, steps: int, work: Path, checkpoint: Checkpoint
) -> tuple[nn.Module, dict[str, Any]]:
    dense = build(job.network, data.classes).to(data.device)
    more: dict[str, Any] = {}
    if job.needs_dense:
        saved = torch.load(job.dense_file(work), map_location=data.device)
        dense.load_state_dict(saved["state"])
        more["dense_error"] = saved["error"]
    settings = Settings(
        job.network,
        job.target,
        steps,
        job.peak_lr,
        job.seed,
        regularization=job.regularization,
        round_to=job.round_to,
        images=SMOKE_IMAGES if job.smoke else Settings.images,
        schedule=job.schedule,
        compiled=job.compiled,
        checkpoint=checkpoint,
    )
    outcome = METHODS[job.method](dense, data, settings)
    more |= outcome.more
    more["prune_seconds"] = round(outcome.prune_seconds, 2)
    more["train_seconds"] = round(outcome.train_seconds, 2)
    if steps:
        more["error"] = error(outcome.model, data)
    else:
        both = more["error_as_pruned"], more["error_recalibrated"]
        more["error"] = min(both) if job.method in PEERS else both[0]
    return outcome.model, more


@cache
def _environment(device: torch.device) -> dict[str, Any]:
    try:
        import torch_pruning

        peer = getattr(torch_pruning, "__version__", "unknown")
    except ImportError:  # only some methods need it
        peer = None
    return {**environment(device), "torch_pruning": peer}


def takes_part(cell: str, method: str) -> bool:
    """Whether a method runs in a cell."""
    return method in CELLS[cell]
