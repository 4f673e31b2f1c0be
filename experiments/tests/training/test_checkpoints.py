"""What is said before a run, and when it cannot go on."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hardconcrete.demo import MLP
from hardconcrete.demo.data import Images
from hardconcrete.errors import DataError, HardConcreteError
from hardconcrete_paper.mnist.experiment import MnistExperiment, learner
from hardconcrete_paper.training.checkpoints import forecast, load, train
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
    written: list[str] = []

    def noted(content: dict[str, torch.Tensor], path: Path, *rest: object) -> None:
        written.append(path.name.split(".")[1])
        save_file(content, path, *rest)

    monkeypatch.setattr("hardconcrete.files.tensors.save_file", noted)
    assert train(*short, {}, 1)
    assert written == ["0001-0", "checkpoint", "0002-0", "checkpoint"]


def test_a_file_that_cannot_be_written_stops_the_run(
    short: tuple[Engine, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hardconcrete.files.tensors.save_file", fail)
    with pytest.raises(DataError, match="was not written: disk full"):
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


def trained(folder: RunFolder) -> None:
    data = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8), "blank")
    one = Learner("dense", 0, MLP(16, (8, 8)), Recipe(epochs=2, batch_size=4))
    train(Engine([one], data), folder, {}, 1)


def test_a_checkpoint_of_a_later_epoch_than_the_run_has(short: tuple[Engine, RunFolder]) -> None:
    engine, folder = short
    trained(folder)
    content, _, seconds = folder.load()
    folder.save(content, 99, seconds)
    with pytest.raises(DataError, match="is of epoch 99, and this run has 2 epochs"):
        load(engine, folder)


@pytest.mark.parametrize(
    "change", [lambda t: t[:1], lambda t: t.double(), None], ids=["shape", "type", "missing"]
)
def test_a_checkpoint_of_another_network(short: tuple[Engine, RunFolder], change: object) -> None:
    engine, folder = short
    trained(folder)
    content, epoch, seconds = folder.load()
    bias = content.pop("seed0.model.fc1.bias")
    if change is not None:
        content["seed0.model.fc1.bias"] = change(bias).clone()  # type: ignore[operator]
    folder.save(content, epoch, seconds)
    with pytest.raises(DataError, match=r"is of another network: model.fc1.bias is"):
        load(engine, folder)
