"""Table 2 and figure 4 from runs at a small size, on a few made-up images."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.tests.cifar.test_experiment import small
from experiments.tests.mnist.test_table1 import RESULTS
from hardconcrete_paper.cifar.run import run
from hardconcrete_paper.cifar.table2 import ROW_COLOURS, finished
from hardconcrete_paper.cli import app
from hardconcrete_paper.training.run_folder import RunFolder


@pytest.mark.usefixtures("opened_cifar")
def test_finished_runs_become_a_table_and_a_figure(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    for experiment in (small(), small(seed=1), small(variant="dropout", dataset="cifar100")):
        run(experiment, out=runs, device="cpu")
    assert run(small(variant="dense"), out=runs, device="cpu", minutes=0.0) is None
    said = CliRunner().invoke(app, ["table2", "--runs", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    rows = [line for line in said.output.splitlines() if line.startswith("| wrn-10-1")]
    assert len(rows) == 2  # the unfinished one is none of them
    assert rows[0].startswith("| wrn-10-1 | l0 0.001 | cifar10 | 2 | 2 | ")
    folder = RunFolder(runs / small().name)
    assert "at last" not in rows[0]
    lines = folder.lines()
    folder.log({**lines[-1], "epoch": 3, "widths": [1], "seconds": lines[-1]["seconds"] + 9})
    folder.log({**lines[-1], "epoch": 4, "widths": [1], "seconds": lines[-1]["seconds"] + 9.5})
    said = CliRunner().invoke(app, ["table2", "--runs", str(runs), "--out", str(out)])
    (last,) = re.findall(r", at last ([\d,]+) \|", said.output)
    result = folder.read()["result"]
    images = result["images_per_second"] * result["seconds"] / 2  # 256, but for the rounding
    assert float(last.replace(",", "")) == pytest.approx(images / 0.5, abs=1)  # epoch 4 alone
    said = CliRunner().invoke(app, ["figure4", "--runs", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "cifar100, dropout, delivered, at the end" in said.output
    assert "cifar10, dense or dropout, counted" in said.output
    assert {file.name for file in out.iterdir()} == {"table2.md", "figure4.svg", "figure4.png"}


KEPT = "wrn-28-10-cifar10-budget-0.5-noise-shrink3-seed0"


def drawn(command: str, runs: Path) -> str:
    said = CliRunner().invoke(app, [command, "--runs", str(runs), "--out", str(runs)])
    return " ".join(said.output.split())


def test_the_committed_runs_can_be_read(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "wide", tmp_path, dirs_exist_ok=True)
    said = drawn("table2", tmp_path)
    row = "| wrn-28-10 | budget 0.5, noise, shrink 3 | cifar10 | 200 | 5 | 4.02% (3.80% to 4.16%) |"
    assert row in said
    swa = "| wrn-28-10 | budget 0.5, noise, averaged from 0.6, shrink 3 | cifar10 | 200 | 2 | 3.85%"
    assert swa in said
    assert "| wrn-28-10 | l0 0.001 | cifar10 | 200 | 3 | 3.80% (3.69% to 3.89%) |" in said
    assert "| wrn-28-10 | l0 0.002 | cifar10 | 200 | 1 | 3.85% | 100.0% | 84.5% |" in said
    assert "averaged from 0.6, shrink 3 | cifar10 | 200 | 1 | 3.99% | 16.0% |" in said
    assert "wrote" in drawn("figure4", tmp_path)
    drawn_rows = {run.row for run in finished(tmp_path) if run.row[0] == "wrn-28-10"}
    assert len(drawn_rows) <= len(ROW_COLOURS)


def test_a_run_without_latencies_hides_none(tmp_path: Path) -> None:
    for seed in (0, 1):
        name = f"{KEPT[:-1]}{seed}"
        shutil.copytree(RESULTS / "wide" / name, tmp_path / name)
    folder = RunFolder(tmp_path / KEPT)
    record = folder.read()
    folder.write({**record, "result": {**record["result"], "latency": {}}})
    assert "1.39x (cuda, bfloat16, batch 128)" in drawn("table2", tmp_path)  # of the other seed


def without_metrics(folder: RunFolder) -> None:
    folder.metrics.unlink()


def of_another_version(folder: RunFolder) -> None:
    record = folder.read()
    folder.write({**record, "settings": {**record["settings"], "luck": 1}})


def incomplete(folder: RunFolder) -> None:
    record = folder.read()
    del record["result"]["units"]
    folder.write(record)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_metrics, "metrics.jsonl is missing or empty"),
        (of_another_version, "record.json is no record of .* argument 'luck'"),
        (incomplete, "record.json is no record of .* it lacks 'units'"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    damage: Callable[[RunFolder], None], words: str, tmp_path: Path
) -> None:
    shutil.copytree(RESULTS / "wide" / KEPT, tmp_path / KEPT)
    damage(RunFolder(tmp_path / KEPT))
    assert re.search(f"error: {tmp_path / KEPT}/{words}", drawn("figure4", tmp_path))
