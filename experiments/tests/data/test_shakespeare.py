import gzip
import hashlib
import os
from pathlib import Path

import pytest
import torch

from hardconcrete.demo.data import RemoteFile
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete_paper.data import shakespeare as text
from hardconcrete_paper.data.shakespeare import load_shakespeare

pytestmark = pytest.mark.usefixtures("alone")

REAL = os.environ.get("HARDCONCRETE_DATA")
SMALL = b"To be, or not to be:\n"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    file = RemoteFile("input.txt", md5_plain=hashlib.md5(SMALL).hexdigest())
    monkeypatch.setattr(text, "SHAKESPEARE_FILE", file)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("place", ["", "tinyshakespeare"])
@pytest.mark.parametrize("packed", [False, True])
def test_both_parts(tmp_path: Path, place: str, packed: bool) -> None:
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    name, content = ("input.txt.gz", gzip.compress(SMALL)) if packed else ("input.txt", SMALL)
    (folder / name).write_bytes(content)
    train, test = load_shakespeare("train", tmp_path), load_shakespeare("test", tmp_path)
    assert train.alphabet == test.alphabet == "\n ,:Tbenort"
    assert train.decode(train.numbers) == "To be, or not to b"
    assert test.decode(test.numbers) == "e:\n"
    assert train.numbers.dtype == torch.int64
    assert (len(train), len(test)) == (18, 3)


def test_another_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(SMALL)
    with pytest.raises(DataError, match=r"input\.txt is corrupt(.|\n)*karpathy/char-rnn/master"):
        load_shakespeare("train", tmp_path)


def test_unknown_split() -> None:
    with pytest.raises(ArgumentError, match="split 'validation' is not known"):
        load_shakespeare("validation")  # type: ignore[arg-type]


def test_windows_and_what_follows() -> None:
    whole = text.Text(torch.arange(50), "?" * 50, "numbers")
    starts = torch.tensor([0, 7, 41])
    pieces, following = whole.windows(starts, 8)
    assert pieces.shape == following.shape == (3, 8)
    assert torch.equal(following, pieces + 1)
    assert torch.equal(pieces[:, 0], starts)
    assert following[-1, -1] == 49


@pytest.mark.skipif(
    not REAL or not any(Path(REAL).glob("**/input.txt*")),
    reason="HARDCONCRETE_DATA does not name a directory with the text",
)
def test_real_text() -> None:
    train, test = load_shakespeare("train", Path(REAL)), load_shakespeare("test", Path(REAL))
    assert (len(train), len(test)) == (1_003_854, 111_540)
    assert len(train.alphabet) == 65
    assert train.decode(train.numbers[:14]) == "First Citizen:"
    assert train.numbers.max() == 64
