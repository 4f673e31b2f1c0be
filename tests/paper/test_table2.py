"""Table 2 and figure 4 from runs at a small size, on a few made-up images."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hardconcrete.cli import app
from hardconcrete.paper.records import RunFolder
from hardconcrete.paper.wide_run import run_wide
from tests.paper.test_wide import small


@pytest.mark.usefixtures("opened_cifar")
def test_finished_runs_become_a_table_and_a_figure(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    for experiment in (small(), small(seed=1), small(variant="dropout", dataset="cifar100")):
        run_wide(experiment, out=runs, device="cpu")
    assert run_wide(small(variant="dense"), out=runs, device="cpu", minutes=0.0) is None
    said = CliRunner().invoke(app, ["reproduce", "table2", "--runs", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    rows = [line for line in said.output.splitlines() if line.startswith("| wrn-10-1")]
    assert len(rows) == 2  # the unfinished one is none of them
    assert rows[0].startswith("| wrn-10-1 | l0 0.001 | cifar10 | 2 | 2 | ")
    folder = RunFolder(runs / small().name)
    assert "at last" not in rows[0]
    lines = folder.lines()
    folder.log({**lines[-1], "epoch": 3, "widths": [1], "seconds": lines[-1]["seconds"] + 9})
    folder.log({**lines[-1], "epoch": 4, "widths": [1], "seconds": lines[-1]["seconds"] + 9.5})
    said = CliRunner().invoke(app, ["reproduce", "table2", "--runs", str(runs), "--out", str(out)])
    (last,) = re.findall(r", at last ([\d,]+) \|", said.output)
    assert float(last.replace(",", "")) == pytest.approx(256 / 0.5, rel=0.1)  # epoch 4 alone
    said = CliRunner().invoke(app, ["reproduce", "figure4", "--runs", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "cifar100, dropout, delivered, at the end" in said.output
    assert {file.name for file in out.iterdir()} == {"table2.md", "figure4.svg", "figure4.png"}
