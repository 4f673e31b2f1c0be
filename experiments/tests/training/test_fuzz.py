"""Hostile files of a run and of CIFAR: only our errors, in seconds and without much memory."""

import json
import shutil
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from experiments.tests.training.test_faults import make_learner, run
from hardconcrete.demo.data import Images
from hardconcrete.errors import DataError
from hardconcrete_paper.data.cifar import PIXELS, from_binary
from hardconcrete_paper.training.checkpoints import load
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.run_folder import CHECKPOINT, RunFolder
from tests.fuzz.limits import survive
from tests.fuzz.mutations import forged, mutated, mutated_json
from tests.processes import in_processes

DATA = Images(torch.zeros(60, 1, 4, 4, dtype=torch.uint8), torch.arange(60) % 10, "blank")


def fresh(folder: Path) -> tuple[Path, RunFolder]:
    """A copy of the files of a run, without the checkpoint before the last."""
    source, target = folder.parent / "run", RunFolder(folder / "run")
    shutil.rmtree(target.path, ignore_errors=True)
    shutil.copytree(source, target.path, ignore=shutil.ignore_patterns("snapshots", "*previous*"))
    return source, target


def resume(run: RunFolder) -> None:
    """A checkpoint that is accepted has finite numbers, and continues."""
    engine = Engine([make_learner()], DATA)
    load(engine, run)
    assert engine.done <= engine.epochs


def altered_checkpoint(folder: Path, draw: Random) -> None:
    """Nothing but the checkpoint that was written is accepted."""
    source, run = fresh(folder)
    run.checkpoint.write_bytes(mutated((source / run.checkpoint.name).read_bytes(), draw))
    (tensors, *about), (expected, *words) = run.load() or (), RunFolder(source).load() or ()
    assert about == words
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def forged_checkpoint(folder: Path, draw: Random) -> None:
    source, run = fresh(folder)
    forged(CHECKPOINT, source / run.checkpoint.name, run.checkpoint, draw)
    resume(run)


def metrics_and_record(folder: Path, draw: Random) -> None:
    source, run = fresh(folder)
    file = draw.choice([run.metrics, run.record])
    text = (source / file.name).read_text()
    if draw.random() < 0.5:
        file.write_bytes(mutated(text.encode(), draw))
    else:
        objects = [
            json.loads(line) for line in (text.splitlines() if "jsonl" in file.name else [text])
        ]
        changed = mutated_json(objects, draw)
        file.write_text("\n".join(map(json.dumps, changed)) + "\n")
    run.load()
    run.begin(run.read()["settings"], resume=True)
    run.note_environment({"torch": "2"})
    run.note_opening()
    run.has_been_tested()


def cifar(_: Path, draw: Random) -> None:
    content = bytes([3]) + bytes(PIXELS)
    images, labels = from_binary(1, {"test": mutated(content * 2, draw)})
    assert len(images) == len(labels)
    assert labels.max() < 10


TARGETS = {
    "altered checkpoint": (altered_checkpoint, 60),
    "forged checkpoint": (forged_checkpoint, 15),
    "metrics and record": (metrics_and_record, 60),
    "cifar": (cifar, 60),
}
"""What is attacked, and how often in the default tier."""


def prepare(_: int, folder: Path) -> None:
    run(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    in_processes(1, prepare, folder)
    return folder


def fuzz(_: int, folder: Path, finished: Path, target: str, count: int) -> None:
    torch.set_num_threads(1)
    (folder / "inside").mkdir()
    shutil.copytree(finished, folder / "run")
    attempt, _ = TARGETS[target]
    survive(partial(attempt, folder / "inside"), count, folder / "inside")


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_files_of_a_run(tmp_path: Path, finished: Path, target: str) -> None:
    in_processes(1, fuzz, tmp_path, finished, target, TARGETS[target][1])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_hostile_files_of_a_run_at_length(tmp_path: Path, finished: Path, target: str) -> None:
    in_processes(1, fuzz, tmp_path, finished, target, 25 * TARGETS[target][1])


def test_a_label_that_is_no_class() -> None:
    with pytest.raises(DataError, match="it has a label 10"):
        from_binary(1, {"test": bytes([10]) + bytes(PIXELS)})
