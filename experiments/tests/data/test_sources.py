import gzip
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.tests.data.archives import archived, archived_source
from hardconcrete.demo.data import Package, RemoteFile, cache_folder
from hardconcrete.errors import DataError
from hardconcrete_paper.data.sources import ArchivedSource, Edition, obtain_first
from tests.demo.published import BOTH, CONTENT, FILES, Mirror, md5, put, put_npm, tarball

pytestmark = pytest.mark.usefixtures("alone")


def obtain(
    source: ArchivedSource, files: tuple[RemoteFile, ...], data: Path | None = None
) -> list[bytes]:
    return obtain_first([Edition(source, files)], data)[1]


PLAIN = tuple(RemoteFile(name, md5_plain=md5(content)) for name, content in CONTENT.items())
VOUCHED = ArchivedSource("Tiny", "tiny", ("tiny", ""), vouched=True)


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
        obtain(archived_source(), PLAIN, tmp_path)
    assert "SHA256SUMS" not in str(refusal.value)


def test_archive_in_place_of_files(tmp_path: Path) -> None:
    packed, archive = archived(CONTENT)
    put(tmp_path / "tiny", {"all.tar.gz": packed})
    assert obtain(archived_source(archive=archive), PLAIN, tmp_path) == BOTH
    assert obtain(archived_source(archive=archive), PLAIN[1:], tmp_path) == BOTH[1:]


def test_files_win_over_an_archive(tmp_path: Path) -> None:
    put(tmp_path, {**CONTENT, "all.tar.gz": b"never opened"})
    assert obtain(archived_source(archive=archived(CONTENT)[1]), PLAIN, tmp_path) == BOTH


def test_damaged_archive(tmp_path: Path) -> None:
    packed, archive = archived(CONTENT)
    put(tmp_path, {"all.tar.gz": packed[:-1] + b"?"})
    with pytest.raises(DataError, match=r"all\.tar\.gz is corrupt or truncated"):
        obtain(archived_source("https://example.org/", archive=archive), PLAIN, tmp_path)


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
        obtain(
            archived_source("https://example.org/", archive=archived(CONTENT)[1]), PLAIN, tmp_path
        )
    assert "from https://example.org/all.tar.gz;" in str(e.value)


def test_first_complete_edition_is_taken(tmp_path: Path) -> None:
    other = ArchivedSource("Tiny", "tiny", ("",), npm=Package("tiny@1", "package"))
    editions = [Edition(archived_source("https://example.org/"), PLAIN), Edition(other, PLAIN[1:])]
    put(tmp_path, {"labels": CONTENT["labels"]})
    assert obtain_first(editions, tmp_path) == (1, BOTH[1:])
    put(tmp_path, CONTENT)
    assert obtain_first(editions, tmp_path) == (0, BOTH)


def test_what_is_missing_from_the_nearest_edition(tmp_path: Path) -> None:
    far = ArchivedSource("Tiny", "tiny", ("",), mirrors=("https://example.org/",))
    near = ArchivedSource("Tiny", "tiny", ("",), npm=Package("tiny@1", "package"))
    whole = RemoteFile("whole", md5_plain="0")
    editions = [Edition(far, (whole,)), Edition(near, PLAIN)]
    put(tmp_path, {"images": CONTENT["images"]})
    with pytest.raises(DataError) as refusal:
        obtain_first(editions, tmp_path)
    assert str(refusal.value).startswith("labels (or .gz) is not in")
    assert "from https://example.org/ or package of `npm pack tiny@1`" in str(refusal.value)


def test_archive_is_fetched_once_for_all_files(mirror: Mirror) -> None:
    packed, archive = archived(CONTENT)
    mirror.bodies["all.tar.gz"] = packed
    mirror.faults = ["truncate"]
    here = archived_source(mirror.url, archive=archive)
    assert obtain(here, FILES[:1]) == BOTH[:1]
    assert obtain(here, FILES[1:]) == BOTH[1:]
    resumed = f"bytes={len(packed) // 2}-"
    assert mirror.asked == [("all.tar.gz", None), ("all.tar.gz", resumed)]
    assert os.listdir(cache_folder(here)) == ["all.tar.gz"]


def test_next_edition_when_the_first_is_out_of_reach(tmp_path: Path, mirror: Mirror) -> None:
    mirror.faults = ["404"]
    packed = tarball(tmp_path / "made.tgz", CONTENT)
    put_npm(
        tmp_path / "bin",
        f"Path('tiny-1.tgz').write_bytes(Path({str(packed)!r}).read_bytes())",
    )
    first = archived_source(mirror.url, archive=archived(CONTENT)[1])
    editions = [Edition(first, FILES), Edition(archived_source(npm="tiny@1"), FILES[1:])]
    assert obtain_first(editions) == (1, BOTH[1:])
    assert obtain_first(editions) == (1, BOTH[1:])
    assert mirror.asked == [("all.tar.gz", None)]
