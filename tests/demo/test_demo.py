import json
from dataclasses import replace
from pathlib import Path

import pytest

from hardconcrete.demo import find_data, run_demo
from hardconcrete.demo import run as module
from hardconcrete.demo.data import load_digits
from hardconcrete.demo.run import SETTINGS
from hardconcrete.errors import ArgumentError, DataError


@pytest.mark.unwatched
def test_the_digits_prune_themselves(tmp_path: Path) -> None:
    found = run_demo(load_digits("train"), load_digits("test"), tmp_path)
    dense, gated = found.outcomes
    assert dense.units == (64, 100, 50)
    assert gated.macs < 0.7 * dense.macs
    assert gated.error < 6
    assert {file.stem for file in found.files} == {
        "pixels",
        "gates",
        "units",
        "small",
        "record",
    }
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["gated"]["units"] == list(gated.units)
    assert record["dataset"] == "digits"
    assert record["seconds"] > 0
    assert record["small_error"] == pytest.approx(gated.error)
    assert record["measured"]["after"]["params"] < 0.7 * record["measured"]["before"]["params"]
    assert all(file.stat().st_size > 1000 for file in found.files[:-1])


@pytest.mark.parametrize("method", ["sbp", "gnj", "group-lasso", "sparse-vd"])
def test_other_methods(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(SETTINGS["digits"], epochs=1, batch_size=300)
    monkeypatch.setitem(SETTINGS, "digits", quick)
    run_demo(load_digits("train"), load_digits("test"), tmp_path, method=method)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["method"] == method
    assert record["small_error"] == pytest.approx(record["gated"]["error"])


def test_a_lambda_for_a_method_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="sbp has a penalty of its own, without a lambda"):
        run_demo(load_digits("train"), load_digits("test"), tmp_path, lam=0.1, method="sbp")


def test_the_settings_for_mnist_fit_its_images() -> None:
    setting = SETTINGS["mnist"]
    assert setting.sizes == {"fc1:in": 784, "fc2:in": 300, "fc3:in": 100}
    assert setting.gate_lr > setting.lr


def test_a_bad_folder_is_refused_before_training(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ArgumentError, match="is a file; name a folder"):
        run_demo(load_digits("train"), load_digits("test"), taken)


def test_without_mnist_it_says_so_and_takes_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DataError(refuse.words)

    refuse.words = "no network\nmore words"
    monkeypatch.setattr(module, "load_mnist", refuse)
    train, test, title = find_data(None)
    assert (train.name, test.name) == ("digits", "digits")
    assert "because MNIST is out of reach (no network; --data DIR names a folder" in title
    monkeypatch.setattr(refuse, "words", "images.gz is corrupt\nDelete it\nor not")
    assert "(images.gz is corrupt Delete it; --data DIR" in find_data(None)[2]
    monkeypatch.setattr(refuse, "words", "MNIST could not be fetched; tried\n  a mirror")
    assert "(MNIST could not be fetched; --data DIR" in find_data(None)[2]
    monkeypatch.undo()
    monkeypatch.setattr(module, "load_mnist", refuse)
    with pytest.raises(DataError, match="no network"):
        find_data(Path("here"))


def test_mnist_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_mnist", lambda split, _: load_digits(split))
    assert find_data(None)[2].startswith("MNIST")
