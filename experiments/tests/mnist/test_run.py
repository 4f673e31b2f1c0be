"""The rows of table 1 on a few made-up images: what is trained, written, resumed and refused."""

import json
from pathlib import Path

import pytest

from hardconcrete.demo import Display
from hardconcrete.demo.data import find_mnist
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete_paper.mnist import run as mnist
from hardconcrete_paper.mnist.experiment import MnistExperiment
from hardconcrete_paper.mnist.run import MnistTask, run
from hardconcrete_paper.training import driver
from hardconcrete_paper.training.device import choose_device


def test_a_row_is_trained_tested_once_and_written(opened: list[str], tmp_path: Path) -> None:
    experiment = MnistExperiment("mlp", (0.1, 0.5, 5.0), seeds=(0, 1), epochs=2)
    first, second = run(experiment, out=tmp_path, device="cpu")
    assert opened == ["train", "test"]
    assert (first.seed, second.seed) == (0, 1)
    assert first.units == (784, 300, 100)
    assert first.dense_flops == 2 * 266_200
    folder = tmp_path / "mlp-0.1-0.5-5"
    record = json.loads((folder / "record.json").read_text())
    assert record["settings"]["lam"] == [0.1, 0.5, 5.0]
    assert record["tested_on"] == "test set"
    assert record["results"][0]["error"] == first.error
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["seed"]) for line in lines] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    again = run(experiment, out=tmp_path, device="cpu", resume=True)
    assert again == [first, second]
    assert opened == ["train", "test"]


@pytest.mark.usefixtures("opened")
def test_a_row_may_shrink_while_it_is_trained(tmp_path: Path) -> None:
    (result,) = run(MnistExperiment("mlp", (50.0,), epochs=3, shrink=1), out=tmp_path, device="cpu")
    assert [*result.curve] == ["1", "2", "3"]
    assert result.curve["3"] == result.error


def test_validation_never_opens_the_test_set(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "hold_out", lambda images: (images, images.take(slice(0, 50))))
    run(MnistExperiment("lenet5", (0.1,), epochs=1, validate=True), out=tmp_path, device="cpu")
    assert opened == ["train"]
    record = json.loads((tmp_path / "lenet5-0.1-validate" / "record.json").read_text())
    assert record["tested_on"] == "5,000 held-out training images"
    assert "test_opened" not in record


@pytest.mark.usefixtures("opened")
def test_how_to_choose_is_said_before_a_setting_of_ones_own_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(mnist, "EPOCHS", 1)
    for lam in (0.1, 0.2, 0.3):
        experiment = MnistExperiment("mlp", (lam,), epochs=1)
        run(experiment, out=tmp_path, device="cpu", say=lambda words: said.append(str(words)))
    advice = [words for words in said if "--validate" in words]
    assert len(advice) == 2  # 0.1 is the paper's
    assert "It has been opened for mlp-0.1, mlp-0.2." in advice[1]
    for other in ({"epochs": 2}, {"epochs": 1, "shrink": 1}, {"epochs": 1, "weight_decay": 1e-4}):
        assert "not the paper's" in MnistTask(MnistExperiment("mlp", **other)).advice(tmp_path)


@pytest.mark.unwatched
@pytest.mark.usefixtures("opened")
def test_an_interrupted_run_continues_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = MnistExperiment("mlp", (0.1,), seeds=(1, 11), epochs=3)
    whole = run(experiment, out=tmp_path / "whole", device="cpu")
    original = Display.show

    def interrupt(self: object, epoch: int, statuses: object) -> None:
        if epoch == 3:
            raise KeyboardInterrupt
        original(self, epoch, statuses)

    monkeypatch.setattr(Display, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out=tmp_path / "cut", device="cpu")
    monkeypatch.setattr(Display, "show", original)
    resumed = run(experiment, out=tmp_path / "cut", device="cpu", resume=True)
    assert [row.error for row in resumed] == [row.error for row in whole]
    one, other = (
        (tmp_path / name / "mlp-0.1" / "metrics.jsonl").read_text() for name in ("whole", "cut")
    )
    assert without_seconds(one) == without_seconds(other)


def without_seconds(lines: str) -> list[dict]:
    parsed = [json.loads(line) for line in lines.splitlines()]
    assert all(line.pop("seconds") > 0 for line in parsed)
    return parsed


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--device warp"):
        choose_device("warp")
    with pytest.raises(ArgumentError, match="run on cpu and cuda"):
        choose_device("meta")


def test_missing_data_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not in"):
        run(MnistExperiment("mlp"), out=tmp_path / "runs", data=tmp_path / "nowhere", device="cpu")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("opened")
def test_a_refused_budget_leaves_nothing_behind(tmp_path: Path) -> None:
    experiment = MnistExperiment("mlp", (), method="budget", macs=0.0)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="above 0 and up to 1"):
            run(experiment, out=tmp_path / "runs", device="cpu")
    assert not (tmp_path / "runs").exists()


def test_missing_test_files_are_noticed_before_the_training(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "find_mnist", find_mnist)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte .* is not in"):
        run(MnistExperiment("mlp"), out=tmp_path / "runs", data=tmp_path, device="cpu")
    assert not (tmp_path / "runs").exists()
    assert opened == ["train"]
