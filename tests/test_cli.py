import builtins
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hardconcrete
from hardconcrete.cli import app

run = CliRunner().invoke


def test_version() -> None:
    assert run(app, ["--version"]).stdout.strip() == f"hardconcrete {hardconcrete.__version__}"


@pytest.mark.parametrize("command", [[], ["reproduce"]])
def test_without_a_command_it_teaches(command: list[str]) -> None:
    assert "Usage" in run(app, command).output


def test_demo_draws_and_prints_the_facts(tmp_path: Path) -> None:
    result = run(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "0.4633" in result.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"figure2.svg", "figure2.png"}


@pytest.mark.parametrize("figure", ["figure1", "figure2"])
def test_reproduce_draws(figure: str, tmp_path: Path) -> None:
    assert run(app, ["reproduce", figure, "--out", str(tmp_path)]).exit_code == 0
    assert (tmp_path / f"{figure}.svg").read_text().startswith("<?xml")
    assert (tmp_path / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run(app, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'hardconcrete[plot]'" in " ".join(result.output.split())
