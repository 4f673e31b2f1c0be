"""The gallery; its pictures are drawn in test_table1.py, where networks are trained."""

from pathlib import Path

import pytest

from hardconcrete.errors import DataError
from hardconcrete_paper.mnist.gallery import gallery


def test_a_gallery_without_runs_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hardconcrete-paper table1"):
        gallery(tmp_path, tmp_path)
