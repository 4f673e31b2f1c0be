"""Tensor files say what is wrong with them."""

import math
from pathlib import Path

import pytest
import torch

from hardconcrete.errors import DataError
from hardconcrete.files import TensorFile

KIND = TensorFile("example", "1", "note", "this test")
TENSORS = {
    "a": torch.randn(3, 2),
    "none": torch.empty(0, 2),
    "one": torch.tensor(True),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "turned": torch.arange(6).view(2, 3).t(),
}


def test_there_and_back(tmp_path: Path) -> None:
    KIND.write(tmp_path / "f", TENSORS, "text")
    tensors, text = KIND.read(tmp_path / "f")
    assert text == "text"
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_nan_is_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"a": torch.tensor([1.0, math.nan])}
    with pytest.raises(DataError, match="f was not written: a has NaN in it"):
        KIND.write(tmp_path / "f", broken, "")
    assert not [*tmp_path.iterdir()]
    with monkeypatch.context() as patch:
        patch.setattr("hardconcrete.files.tensors._refuse_nan", lambda *_: None)
        KIND.write(tmp_path / "f", broken, "")
    with pytest.raises(DataError, match="f is not usable: a has NaN in it"):
        KIND.read(tmp_path / "f")


def test_a_long_header_is_not_read(tmp_path: Path) -> None:
    KIND.write(tmp_path / "f", {}, "x" * 5000)
    with pytest.raises(DataError, match=r"has a header of 5,.* bytes, and at most 1,000"):
        KIND.read(tmp_path / "f", max_header_bytes=1000)


def test_another_kind(tmp_path: Path) -> None:
    KIND.write(tmp_path / "f", {}, "")
    with pytest.raises(DataError, match="was not written by others: it carries no text"):
        TensorFile("other", "1", "text", "others").read(tmp_path / "f")
    with pytest.raises(DataError, match="has version 1 of the format"):
        TensorFile("example", "2", "note", "").read(tmp_path / "f")
