"""The commands."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hardconcrete
from hardconcrete.cli import app
from hardconcrete.demo.data import load_digits
from hardconcrete.demo.run import SETTINGS

run = CliRunner().invoke


def test_version() -> None:
    assert run(app, ["--version"]).stdout.strip() == f"hardconcrete {hardconcrete.__version__}"


def test_without_a_command_it_teaches() -> None:
    assert "Usage" in run(app, []).output


def test_demo_trains_draws_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(SETTINGS["digits"], epochs=2, batch_size=100, gate_lr=0.1)
    monkeypatch.setitem(SETTINGS, "digits", quick)
    monkeypatch.setattr(
        "hardconcrete.demo.run.load_mnist",
        lambda split, data: load_digits(split),  # noqa: ARG005
    )
    result = run(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "data: MNIST" in result.stdout
    assert "dense" in result.stdout
    assert "(expected 100%)" in result.stdout
    assert "0.4633" in result.stdout
    found = {file.name for file in tmp_path.iterdir()}
    pictures = {
        f"{name}.{kind}" for name in ("pixels", "gates", "units") for kind in ("svg", "png")
    }
    assert found == pictures | {
        "figure2.svg",
        "figure2.png",
        "record.json",
        "small.safetensors",
    }
    assert "fc1: " in result.stdout
    assert "that the MACs promise, the clock shows" in " ".join(result.stdout.split())


def test_groups_prints_the_tree_of_any_importable_model() -> None:
    result = run(app, "groups hardconcrete.demo:MLP --input 1,1,28,28".split())
    assert result.exit_code == 0
    assert "fc2: 100 neurons, each 311 parameters and 310 MACs" in result.stdout
    assert "the model's output" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("hardconcrete.demo --input 1,1,28,28", "must be written package.module:factory"),
        ("hardconcrete.demo:VGG --input 1,1", "cannot be imported"),
        ("hardconcrete.demo:MLP --input 1,x", "must be a shape such as 1,3,32,32"),
        ("hardconcrete.demo:MLP --input 1,3,28,28", "cannot be traced"),
        ("torch:zeros --input 1,3", "cannot be called without arguments"),
        ("collections:OrderedDict --input 1,3", "not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_traced_is_said_in_words(arguments: str, words: str) -> None:
    result = run(app, ["groups", *arguments.split()])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


def test_a_demo_without_its_data_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "report"
    result = CliRunner().invoke(app, ["demo", "--out", str(out), "--data", str(tmp_path)])
    assert result.exit_code == 1
    assert "train-images-idx3-ubyte" in result.output
    assert not out.exists()


def test_a_budget_is_a_part_of_the_dense_network() -> None:
    result = CliRunner().invoke(app, ["demo", "--macs", "1.5"])
    assert result.exit_code == 2
    assert "Invalid value for '--macs'" in result.output


def test_a_lambda_and_a_budget_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["demo", "--lam", "0.1", "--params", "0.5"])
    assert result.exit_code == 1
    assert "exclude each other" in result.output
