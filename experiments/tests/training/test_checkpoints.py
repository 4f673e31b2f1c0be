"""What is said before a run, and when it cannot go on."""

from pathlib import Path

import pytest
import torch

from hardconcrete.demo import MLP
from hardconcrete.demo.data import Images
from hardconcrete.errors import HardConcreteError
from hardconcrete_paper.mnist.experiment import MnistExperiment, learner
from hardconcrete_paper.training import run_folder as records
from hardconcrete_paper.training.checkpoints import forecast, train
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.learner import Learner, Recipe
from hardconcrete_paper.training.run_folder import RunFolder

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        (MnistExperiment("mlp", (0.1,), epochs=1), "this run cannot prune 3 of 3 groups"),
        (MnistExperiment("mlp", (0.1,), epochs=200), ""),
        (MnistExperiment("mlp", (), method="dense", epochs=1), ""),
        (MnistExperiment("mlp", (), method="budget", macs=0.3, epochs=1), ""),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_what_is_known_before_the_first_step(experiment: MnistExperiment, words: str) -> None:
    told = forecast(learner(experiment, 0, 30_000, CPU), 300)
    assert words in told
    assert bool(words) == bool(told)


@pytest.mark.unwatched
def test_a_budget_that_its_steps_are_too_few_for() -> None:
    few = learner(MnistExperiment("mlp", (), method="budget", macs=0.3, epochs=1), 0, 10_000, CPU)
    words = "cannot meet its budget: in 100 steps it moves the gates of fc1:in by 1.4 at most"
    assert words in forecast(few, 100)


def test_a_run_that_lost_its_numbers_stops_in_words(tmp_path: Path) -> None:
    data = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8), "blank")
    one = Learner("gated", 0, MLP(16, (8, 8)), Recipe(epochs=2, batch_size=4))
    folder = RunFolder(tmp_path / "run")
    folder.begin({}, resume=False)
    engine = Engine([one], data)
    one.model.fc3.bias.data.fill_(float("nan"))
    words = "gated: after epoch 1 the loss is nan and 2 of 6 tensors .* are no numbers"
    with pytest.raises(HardConcreteError, match=words):
        train(engine, folder, {}, 1)
    assert not folder.checkpoint.exists()


@pytest.fixture
def short(tmp_path: Path) -> tuple[Engine, RunFolder]:
    """Two epochs of a small network, and where they are written."""
    data = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8), "blank")
    one = Learner("dense", 0, MLP(16, (8, 8)), Recipe(epochs=2, batch_size=4))
    folder = RunFolder(tmp_path / "run")
    folder.begin({}, resume=False)
    return Engine([one], data), folder


def test_a_checkpoint_comes_after_what_was_kept_of_its_epoch(
    short: tuple[Engine, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, save_file = [], records.save_file

    def noted(tensors: dict[str, torch.Tensor], path: Path, *rest: object) -> None:
        written.append(path.name)
        save_file(tensors, path, *rest)

    monkeypatch.setattr(records, "save_file", noted)
    assert train(*short, {}, 1)
    assert written == ["0001-0.tmp", "checkpoint.tmp", "0002-0.tmp", "checkpoint.tmp"]


def test_a_file_that_cannot_be_written_stops_the_run(
    short: tuple[Engine, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(records, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        train(*short, {}, 1)


def test_weights_that_were_lost_in_the_last_step_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8), "blank")
    one = Learner("dense", 0, MLP(16, (8, 8)), Recipe(epochs=2, batch_size=8))
    folder = RunFolder(tmp_path / "run")
    folder.begin({}, resume=False)
    engine = Engine([one], data)
    step = engine._step

    def diverging() -> None:
        step()
        one.model.fc3.bias.data[0] = float("inf")

    monkeypatch.setattr(engine, "_step", diverging)
    with pytest.raises(HardConcreteError, match=r"the loss is 2\.\d+ and 1 of 6 tensors"):
        train(engine, folder, {}, 1)
    assert not folder.checkpoint.exists()
