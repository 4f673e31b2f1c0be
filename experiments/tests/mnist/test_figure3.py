"""Figure 3 without its runs; with them it is drawn in the sweep of ``test_table1.py``."""

from pathlib import Path

import pytest

from hardconcrete.errors import DataError
from hardconcrete_paper.mnist.experiment import MnistExperiment
from hardconcrete_paper.mnist.figure3 import figure3
from hardconcrete_paper.mnist.table1 import Row


def test_a_figure_without_its_epochs_is_refused(tmp_path: Path) -> None:
    rows = [Row(MnistExperiment("mlp", lam), [], {}) for lam in ((0.1,), (0.1, 0.5, 5.0))]
    with pytest.raises(DataError, match=r"metrics.jsonl is missing or empty"):
        figure3(rows, tmp_path, tmp_path)
