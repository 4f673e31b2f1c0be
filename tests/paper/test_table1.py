"""The sweep behind table 1, figure 3 and the gallery, on a few made-up images."""

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hardconcrete.cli import app
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete.paper import table1
from hardconcrete.paper.examination import READOUTS
from hardconcrete.paper.experiment import NETWORKS, QUIRKS, Experiment, gated_network, learner
from hardconcrete.paper.gallery import gallery


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_sweep_can_be_stopped_and_ends_in_a_table_a_figure_and_a_page(
    opened: list[str], tmp_path: Path
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    common = ["--seeds", "2", "--epochs", "2", "--device", "cpu", "--runs", str(runs)]
    said = call("table1", *common, "--out", str(out))
    assert "8 runs on this CPU will take about" in said
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
    assert "gallery/pixels.png" in (tmp_path / "docs" / "gallery.md").read_text()


def test_the_authors_differences_are_tried_one_by_one_and_together() -> None:
    names = [each.name for each in table1.experiments(1, faithful=True)]
    assert names[:2] == ["mlp-0.1-clamp", "mlp-0.1-clamp-average"]
    assert names[4:7] == ["lenet5-0.1-clamp", "lenet5-0.1-bias", "lenet5-0.1-clamp-average-bias"]
    assert len(names) == 10


def test_the_authors_bias_is_not_trained_and_lowers_the_price() -> None:
    network, cpu = NETWORKS["lenet5"], torch.device("cpu")
    lam = (10.0, 0.5, 0.1, 10.0)
    gated, penalty = gated_network(network, lam, 60_000, cpu)
    theirs, their_penalty = gated_network(network, lam, 60_000, cpu, without_bias=True)
    sizes = {group.name: group.size for group in gated.groups}
    assert (sizes["conv1:out"], sizes["conv2:out"]) == (26, 501)
    ratio = {name: their_penalty.lam[name] / penalty.lam[name] for name in sizes}
    assert ratio["conv1:out"] == pytest.approx(24 / 26)
    assert ratio["conv2:out"] == pytest.approx(499 / 501)
    assert ratio["fc1:in"] == ratio["fc2:in"] == 1
    frozen = {name for name, p in theirs.model.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1.bias", "conv2.bias"}


def test_quirks_reach_the_recipe() -> None:
    one = learner(Experiment("mlp", quirks=tuple(QUIRKS)), 0, 100, torch.device("cpu"))
    assert one.recipe.clamp == pytest.approx(4.60517)
    assert one.recipe.divided_average


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "l1"}, "'l1' is not known: l0, dense, dropout"),
        ({"method": "dense"}, "a dense network has no gates"),
        ({"quirks": ("luck",)}, "quirk 'luck' is not known: clamp, average, bias"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Experiment("mlp", **arguments)


def test_a_table_without_seeds_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--seeds 0"):
        table1.experiments(0)


def test_a_gallery_without_runs_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hardconcrete reproduce table1"):
        gallery(tmp_path, tmp_path)
