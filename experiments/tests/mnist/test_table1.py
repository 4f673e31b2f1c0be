"""The sweep behind table 1, figure 3 and the gallery, on a few made-up images."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hardconcrete.errors import ArgumentError, DataError
from hardconcrete_paper.cli import app
from hardconcrete_paper.mnist import examination, table1
from hardconcrete_paper.mnist.examination import READOUTS
from hardconcrete_paper.mnist.experiment import MnistExperiment, learner
from hardconcrete_paper.training.run_folder import RunFolder

RESULTS = Path(__file__).parents[3] / "results"


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_sweep_ends_in_a_table_a_figure_and_a_page(opened: list[str], tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    common = ["--seeds", "0", "1", "--epochs", "2", "--device", "cpu", "--runs", str(runs)]
    said = call("table1", *common, "--out", str(out))
    assert re.search(r"8 runs on this CPU will take about \d+ minutes", said)
    assert "run 8 of 8: LeNet-5-Caffe 20-50-800-500, L0, lambda sep." in said
    lines = list(csv.DictReader((out / "table1.csv").read_text().splitlines()))
    assert len(lines) == 16
    assert {line["method"] for line in lines} == {"l0", "dense", "dropout"}
    last = lines[-1]
    assert (last["network"], last["lambdas"]) == ("lenet5", "10/N 0.5/N 0.1/N 10/N")
    assert int(last["params"]) == 431_080
    assert int(last["macs"]) == 2_293_000
    assert int(last["expected_macs"]) < 2_293_000
    assert {line["disagreements"] for line in lines} == {"0"}
    assert all(line["device"] and line["torch"] and line["date"] for line in lines)
    page = (out / "table1.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| L0, lambda sep. | 20-50-")]
    assert "| 431.1k | 9-18-65-25, 1.0%, 6.2k | 2293k |" in row
    assert "BC-GHS 5-10-76-16, 1.0%, 2.8k" in page
    assert {file.name for file in out.iterdir()} >= {"table1.svg", "table1.png"}

    record = json.loads((runs / "mlp-0.1" / "record.json").read_text())
    result = record["results"][0]
    assert [*result["readouts"]] == list(READOUTS)
    assert [*result["curve"]] == ["1", "2"]
    assert result["curve"]["2"] == result["error"]

    tests_read = opened.count("test")
    assert tests_read == 8
    said = call("table1", *common, "--out", str(out))
    assert "will take" not in said
    assert opened.count("test") == tests_read  # nothing is tested twice

    said = call("figure3", *common, "--out", str(out))
    assert "lenet5, dropout, uncoupled" in said
    assert opened.count("test") == tests_read
    svg = (out / "figure3.svg").read_text()
    assert svg.count("<path") > 20

    call("gallery", "--runs", str(runs), "--out", str(tmp_path / "docs"))
    pictures = {file.stem for file in (tmp_path / "docs" / "gallery").iterdir()}
    assert pictures == {"pixels", "trajectories", "filters"}
    page = (tmp_path / "docs" / "gallery.md").read_text()
    assert "gallery/pixels.png" in page
    assert "end with 784-300-100, 20-50-800-500, 20-50-800-500\nunits." in page


def test_a_stopped_sweep_goes_on_and_says_if_the_test_set_was_opened_before(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [
        MnistExperiment("mlp", (), method="dropout", epochs=2),
        MnistExperiment("mlp", epochs=2),
    ]
    whole = table1.train(chosen, runs=tmp_path / "whole", device="cpu")
    readouts = examination._readouts
    monkeypatch.setattr(examination, "_readouts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        table1.train(chosen, runs=tmp_path / "cut", device="cpu")
    monkeypatch.setattr(examination, "_readouts", readouts)
    resumed = table1.train(chosen, runs=tmp_path / "cut", device="cpu")
    assert [row.results[0].error for row in resumed] == [row.results[0].error for row in whole]
    assert [len(row.record["test_opened"]) for row in whole] == [1, 1]
    assert [len(row.record["test_opened"]) for row in resumed] == [1, 2]
    assert opened.count("test") == 5


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("opened")
def test_other_settings_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    table1.train([MnistExperiment("mlp", epochs=1)], runs=tmp_path, device="cpu")
    chosen = [
        MnistExperiment("mlp", (), method="dense", epochs=2),
        MnistExperiment("mlp", epochs=2),
    ]
    with pytest.raises(ArgumentError, match="epochs=1, which cannot continue with 2"):
        table1.train(chosen, runs=tmp_path, device="cpu")
    assert not (tmp_path / "mlp-dense").exists()


@pytest.mark.usefixtures("opened")
def test_what_is_finished_needs_no_data_and_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [MnistExperiment("mlp", epochs=1)]
    first = table1.train(chosen, runs=tmp_path, device="cpu")
    monkeypatch.setattr("hardconcrete_paper.mnist.run.load_mnist", interrupt)
    assert table1.train(chosen, runs=tmp_path, device="nowhere") == first


def test_a_file_for_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ArgumentError, match="runs is a file"):
        table1.train([MnistExperiment("mlp")], runs=tmp_path / "runs", device="cpu")


@pytest.mark.usefixtures("opened")
def test_a_damaged_snapshot_is_found_before_the_test_set_is_opened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.snapshot(3, 0, {"x": torch.ones(2)})
    assert next(iter(folder.snapshots(0)))[0] == 3
    (tmp_path / "snapshots" / "0003-0.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="is damaged"):
        list(folder.snapshots(0))


@pytest.mark.unwatched
@pytest.mark.parametrize("opened", [6], indirect=True)
@pytest.mark.usefixtures("opened")
def test_a_budget_is_met_by_a_row(tmp_path: Path) -> None:
    arguments = ["--macs", "0.3", "--epochs", "60", "--device", "cpu", "--out", str(tmp_path)]
    said = call("mlp", *arguments)
    assert "seed 0" in said
    (row,) = (line.split("│") for line in said.splitlines() if line.startswith("│ seed 0"))
    kept, dense = (int(cell.strip().removesuffix("k")) for cell in row[5:7])
    assert dense == 532
    assert 0.28 < kept / dense <= 0.301  # of the compacted network
    record = json.loads((tmp_path / "mlp-budget-macs-0.3" / "record.json").read_text())
    assert 0.28 < record["results"][0]["small_flops"] / 532_400 <= 0.3


@pytest.mark.parametrize("lam", [(0.1,), ()])
def test_a_small_network_is_timed_beside_trained_weights(lam: tuple[float, ...]) -> None:
    experiment = MnistExperiment("lenet5", lam, method="l0" if lam else "dropout")
    one = learner(experiment, 0, 100, torch.device("cpu"))
    with torch.no_grad():
        for parameter in one.averaged.parameters():
            parameter.fill_(0.25)  # what training leaves
    dense = examination._dense(experiment, one)
    assert all((parameter == 0.25).all() for parameter in dense.parameters())
    assert sum(parameter.numel() for parameter in dense.parameters()) == 431_080


def test_a_lambda_and_a_budget_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["mlp", "--lam", "0.1", "--params", "0.5"])
    assert result.exit_code == 1
    assert "exclude each other" in result.output


def test_the_authors_differences_are_tried_one_by_one_and_together() -> None:
    names = [each.name for each in table1.experiments((0,), faithful=True)]
    assert names[:3] == ["mlp-0.1-clamp", "mlp-0.1-average", "mlp-0.1-clamp-average"]
    alone = [f"lenet5-0.1-{quirk}" for quirk in ("clamp", "average", "bias")]
    assert names[6:10] == [*alone, "lenet5-0.1-clamp-average-bias"]
    assert len(names) == 14


def test_a_table_without_seeds_is_refused() -> None:
    with pytest.raises(ArgumentError, match="must name at least one seed"):
        table1.experiments(())


@pytest.mark.parametrize("faithful", [False, True])
def test_the_committed_records_redraw_the_table(tmp_path: Path, faithful: bool) -> None:
    results, name = RESULTS, "table1-faithful" if faithful else "table1"
    chosen = table1.experiments(faithful=faithful)
    rows = table1.train(chosen, runs=results / "table1", device="none")
    table1.write(rows, tmp_path, name)
    for suffix in ("csv", "md"):
        made, kept = (folder / f"{name}.{suffix}" for folder in (tmp_path, results))
        assert made.read_text() == kept.read_text()
