"""Table 2 and figure 4 from runs at a small size, on a few made-up images."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hardconcrete.cli import app
from hardconcrete.paper.wide import run_wide
from tests.paper.test_wide import small


@pytest.mark.usefixtures("opened_cifar")
def test_finished_runs_become_a_table_and_a_figure(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    shrinking = small(variant="budget", shrink=1, epochs=4, gate_lr=4.0)
    dropout = small(variant="dropout", dataset="cifar100")
    for experiment in (small(), small(seed=1), dropout, shrinking):
        run_wide(experiment, out=runs, device="cpu")
    assert run_wide(small(variant="dense"), out=runs, device="cpu", minutes=0.0) is None
    said = CliRunner().invoke(app, ["reproduce", "table2", "--runs", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    rows = [line for line in said.output.splitlines() if line.startswith("| wrn-10-1")]
    assert len(rows) == 3  # the unfinished one is none of them
    assert rows[0].startswith("| wrn-10-1 | budget, gates 4 0.5 | cifar10 | 4 | 1 | ")
    assert rows[1].startswith("| wrn-10-1 | l0 0.001 | cifar10 | 2 | 2 | ")
    assert [", at last " in row for row in rows] == [True, False, False]
    said = CliRunner().invoke(app, ["reproduce", "figure4", "--runs", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "cifar100, dropout, delivered, at the end" in said.output
    assert {file.name for file in out.iterdir()} == {"table2.md", "figure4.svg", "figure4.png"}
