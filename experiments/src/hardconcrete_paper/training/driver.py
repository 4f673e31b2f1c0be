"""A run, from its first step to the test set: the same for every data set.

Only training images are read until a run is trained. Then the test set is opened once, and all
results are computed and recorded.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from hardconcrete.demo import Prepare
from hardconcrete.demo.data import Images, Split
from hardconcrete.errors import ArgumentError
from hardconcrete.report import environment
from hardconcrete_paper.data.hold_out import hold_out
from hardconcrete_paper.training.checkpoints import fit, forecast, train
from hardconcrete_paper.training.device import choose_device
from hardconcrete_paper.training.display import Sweep
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner
from hardconcrete_paper.training.processes import agreed, rank
from hardconcrete_paper.training.run_folder import RunFolder
from hardconcrete_paper.training.stacked_learners import start_compilers

R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

HELD_OUT = "5,000 held-out training images"


@dataclass(frozen=True)
class RunOptions:
    """Where and how a run takes place.

    Args:
        out: folder for the folders of runs.
        data: folder with the data set; else the variable, the cache, or a download.
        device: "cpu", "cuda", or "auto".
        resume: whether to continue a run that was begun.
        minutes: stop after so many minutes, between two epochs.
        sweep: which of several runs this is.
        say: takes the notes.
    """

    out: Path
    data: Path | None = None
    device: str = "auto"
    resume: bool = False
    minutes: float | None = None
    sweep: Sweep | None = None
    say: Callable[[str], object] = print

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 <= self.minutes < math.inf:
            raise ArgumentError(f"--max-minutes {self.minutes} must be a number of minutes")


@dataclass(frozen=True)
class Trained:
    """A run whose training has ended.

    Args:
        engine: what trained; it holds the learners.
        folder: the files of the run.
        training: the training images.
        prepare: makes the input of a network from images.
        open_test: opens the test set, and records that.
        seconds_to_build: to compile and capture, before the first epoch.
        began: when the data were read, by ``time.perf_counter``.
        continued: whether the run started from a checkpoint.
        peak_memory: most bytes that training had on the GPU; None on a CPU.
    """

    engine: Engine
    folder: RunFolder
    training: Images
    prepare: Prepare
    open_test: Callable[[], Images]
    seconds_to_build: float
    began: float
    continued: bool
    peak_memory: int | None


class Experiment(Protocol):
    """What the driver needs of an experiment."""

    @property
    def name(self) -> str:
        """A name for the folder."""

    @property
    def validate(self) -> bool:
        """Whether held-out training images stand for the test set."""

    def settings(self) -> dict[str, Any]:
        """All settings, for the record."""


class Task(Protocol[Result]):
    """What differs between data sets."""

    @property
    def experiment(self) -> Experiment:
        """The experiment that is run."""

    def result(self, folder: RunFolder) -> Result | None:
        """The result in the record; None if the run is not finished."""

    def find(self, split: Split, data: Path | None) -> None:
        """Refuse missing files, without opening them."""

    def load(self, split: Split, data: Path | None) -> Images:
        """The images."""

    def learners(self, examples: int, device: torch.device) -> list[Learner]:
        """The networks, before their first step."""

    def stacks(self, device: torch.device) -> bool:
        """Whether the networks are stacked into one."""

    def prepare(self, device: torch.device) -> Prepare:
        """What makes the input of a network from images."""

    def sizes(self, learners: Sequence[Learner]) -> Mapping[str, int]:
        """Units of the dense network, by group."""

    def dense_macs(self) -> int:
        """Multiply-adds of the dense network, for one image."""

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """More metrics of a network after an epoch."""

    def advice(self, out: Path) -> str:
        """A note before the test set is opened for this run; empty if there is none."""

    def examine(self, trained: Trained) -> Iterator[dict[str, Any]]:
        """Compact, test and time; yields additions to the record."""


def drive(task: Task[R], options: RunOptions) -> R | None:
    """Train, compact and test; None if the minutes were over before the end.

    The result of a finished run is read from its record.
    """
    folder = RunFolder(options.out / task.experiment.name)
    if folder.record.exists():
        folder.refuse_others(task.experiment.settings())
        if (result := task.result(folder)) is not None:
            return result
    device, began = choose_device(options.device), time.perf_counter()
    start_compilers(device)
    training, open_test = _images(task, folder, options.data)
    learners = task.learners(len(training), device)
    if rank() == 0:  # after every check
        folder.begin(task.experiment.settings(), resume=options.resume)
        folder.note_environment(environment(device))
        for note in (_forecast(learners[0], len(training), folder), task.advice(options.out)):
            if note:
                options.say(f"note: {note}")
    agreed(0.0)  # all processes wait for the folder
    continued = fit(learners, folder)
    prepare = task.prepare(device)
    engine = Engine(learners, training, stacked=task.stacks(device), prepare=prepare)
    to_build = engine.seconds_to_build
    shown: Any = {"sweep": options.sweep, "minutes": options.minutes, "began": began}
    sizes, macs = task.sizes(learners), task.dense_macs()
    if not train(engine, folder, sizes, macs, facts=task.facts, **shown) or rank() > 0:
        return None
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    options.say("compacting, timing and testing")
    spent: Any = (to_build, began, continued, memory)
    trained = Trained(engine, folder, training, prepare, open_test, *spent)
    for addition in task.examine(trained):
        about = {"tested_on": HELD_OUT if task.experiment.validate else "test set"}
        folder.write({**about, **folder.read(), **addition})
    return task.result(folder)


def _images(
    task: Task[Any], folder: RunFolder, data: Path | None
) -> tuple[Images, Callable[[], Images]]:
    """The training images, and a function that opens the test images."""
    training = task.load("train", data)
    if task.experiment.validate:
        training, held_out = hold_out(training)
        return training, lambda: held_out
    task.find("test", data)

    def open_test() -> Images:
        folder.note_opening()
        return task.load("test", data)

    return training, open_test


def _forecast(learner: Learner, images: int, folder: RunFolder) -> str:
    """The warnings of ``check_run`` for this run, from the record or new."""
    record = folder.read()
    if "forecast" not in record:
        record["forecast"] = forecast(learner, images // learner.recipe.batch_size)
        folder.write(record)
    return str(record["forecast"])
