"""Every table and figure has a command; bad settings and interrupts are said in words."""

import builtins
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hardconcrete_paper.cifar.examination import CifarResult
from hardconcrete_paper.cifar.experiment import CifarExperiment
from hardconcrete_paper.cli import app
from hardconcrete_paper.mnist.examination import MnistResult
from hardconcrete_paper.mnist.experiment import MnistExperiment

run = CliRunner().invoke


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MnistExperiment, dict]]:
    """Stands in for training; what was asked for."""
    asked: list[tuple[MnistExperiment, dict]] = []

    def fake(experiment: MnistExperiment, **where: object) -> list[MnistResult]:
        asked.append((experiment, where))
        return [
            MnistResult(
                seed=seed,
                units=(219, 214, 100),
                error=1.4,
                disagreements=0,
                expected_flops=1.4e5,
                uncoupled_flops=1.6e5,
                delivered_flops=1.5e5,
                dense_flops=5.3e5,
                seconds=40.0,
                small_parameters=69_600,
                small_flops=139_000,
                small_latency=0.2,
                dense_latency=0.5,
                tuned_error=1.3,
            )
            for seed in experiment.seeds
        ]

    monkeypatch.setattr("hardconcrete_paper.mnist.run.run", fake)
    return asked


def test_lists_take_their_values_at_once(trained: list[tuple[MnistExperiment, dict]]) -> None:
    result = run(app, "mlp --lam 0.1 0.5 5 --epochs 3 --seeds 0 1 2 --validate".split())
    assert result.exit_code == 0, result.output
    experiment, where = trained[0]
    assert experiment == MnistExperiment("mlp", (0.1, 0.5, 5.0), (0, 1, 2), 3, validate=True)
    assert where.pop("say") is typer.echo
    assert where == {"out": Path("runs"), "data": None, "device": "auto", "resume": False}
    assert "266-88-33" in result.stdout
    assert result.stdout.count("219-214-100") == 3
    assert "seed 2" in result.stdout


def test_repeated_options_work_as_well(trained: list[tuple[MnistExperiment, dict]]) -> None:
    run(app, "lenet5 --lam 10 --lam 0.5 --lam 0.1 --lam 10 --seeds 4".split())
    assert trained[0][0] == MnistExperiment("lenet5", (10.0, 0.5, 0.1, 10.0), (4,))


def test_weight_decay_is_told_and_the_papers_row_has_none(
    trained: list[tuple[MnistExperiment, dict]],
) -> None:
    result = run(app, "lenet5 --weight-decay 1e-4".split(), env={"COLUMNS": "150"})
    assert trained[0][0] == MnistExperiment("lenet5", (0.1,), weight_decay=1e-4)
    assert "paper, lambda = 0.1/N, no L2" in result.stdout


def test_gates_of_every_example(trained: list[tuple[MnistExperiment, dict]]) -> None:
    run(app, "mlp --per-example".split())
    assert trained[0][0] == MnistExperiment("mlp", (0.1,), per_example=True)


@pytest.mark.parametrize("options", ["", "--validate", "--weight-decay 1e-4", "--macs 0.5"])
@pytest.mark.usefixtures("trained")
def test_a_narrow_terminal_shows_every_word(options: str) -> None:
    result = run(app, f"mlp {options}".split(), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "219-214-100" in result.stdout
    assert "…" not in result.stdout


def test_a_setting_without_a_row_of_the_paper(trained: list[tuple[MnistExperiment, dict]]) -> None:
    result = run(app, "mlp --lam 0.7".split())
    assert trained[0][0].lam == (0.7,)
    assert "paper" not in result.stdout


def test_bad_settings_and_interrupts_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(app, "mlp --lam 1 2".split())
    assert result.exit_code == 1
    assert "one for each of fc1:in" in result.output

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hardconcrete_paper.mnist.run.run", interrupt)
    result = run(app, ["mlp"])
    assert result.exit_code == 130
    assert "--resume continues" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--macs 0.3", "--macs 0.3 must be a part of the multiply-adds, for --variant budget"),
        ("--params 0.3", "--params 0.3 must be a part of the parameters, for --variant budget"),
        ("--variant dense --shrink 3", "--shrink 3 must be a number of epochs"),
        ("--gate-lr 0", "--gate-lr 0.0 must be positive"),
        ("--swa 2", "--swa 2.0 must be a part of the 200 epochs"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: str, words: str) -> None:
    result = run(app, ["wrn", *options.split()])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize("figure", ["figure1", "figure2"])
def test_reproduce_draws(figure: str, tmp_path: Path) -> None:
    assert run(app, [figure, "--out", str(tmp_path)]).exit_code == 0
    assert (tmp_path / f"{figure}.svg").read_text().startswith("<?xml")
    assert (tmp_path / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run(app, ["figure1"])
    assert result.exit_code == 1
    assert "pip install 'hardconcrete[plot]'" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["table1", "figure3", "gallery"])
def test_a_sweep_has_a_folder_of_its_own(command: str) -> None:
    """Where single rows lie, with other seeds perhaps, it could not go on."""
    said = run(app, [command, "--help"], env={"COLUMNS": "200"})
    assert "[default: runs/table1]" in said.output


@pytest.mark.parametrize("command", ["mlp", "wrn"])
def test_a_budget_is_a_part_of_the_dense_network(command: str) -> None:
    result = run(app, [command, "--macs", "1.5"])
    assert result.exit_code == 2
    assert "Invalid value for '--macs'" in result.output


def test_without_a_command_it_teaches() -> None:
    said = run(app, []).output
    commands = ("mlp", "lenet5", "wrn", "table1", "table2", "gallery")
    for command in (*commands, *(f"figure{number}" for number in range(1, 5))):
        assert f" {command} " in said


@pytest.mark.parametrize("command", ["mlp", "lenet5", "table1", "figure3", "wrn"])
def test_seeds_are_a_list_everywhere(command: str) -> None:
    said = " ".join(run(app, [command, "--help"], env={"COLUMNS": "200"}).output.split())
    assert "Seeds of the networks: --seeds 0 1 2." in said
    assert "--seed " not in said


@pytest.mark.parametrize("finished", [True, False])
def test_seeds_of_wrn_are_trained_in_turn(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, object]] = []
    result = CifarResult(
        error=4.0,
        raw_error=5.0,
        units=(),
        macs=(1, 2),
        params=(1, 2),
        expected_macs=1.0,
        seconds=9.0,
        seconds_to_build=1.0,
        images_per_second=7.0,
        peak_memory=None,
        latency={},
        curve={},
        training_curve={},
    )

    def train(experiment: CifarExperiment, **where: object) -> CifarResult | None:
        asked.append((experiment.seed, where["resume"]))
        return result if finished else None

    monkeypatch.setattr("hardconcrete_paper.cifar.run.run", train)
    said = run(app, "wrn --seeds 3 4 --resume".split()).output
    assert said.count("4.00%") == 2 * finished
    assert ("--resume continues" in said) is not finished
    assert asked == [(3, True), (4, True)][: 1 + finished]
