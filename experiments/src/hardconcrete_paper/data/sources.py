"""Data sets that are published in several forms, single files or one archive."""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hardconcrete.demo.data import (
    DOWNLOAD_ERRORS,
    DataFolder,
    FetchAttempt,
    RemoteFile,
    Source,
    data_folder,
    download,
    fetch,
    file_names,
    not_found_error,
    read_member,
    read_verified,
    repair_advice,
)
from hardconcrete.errors import DataError

SUMS = "SHA256SUMS"
"""A file of ``sha256sum``. It accepts copies whose bytes are not the official ones."""


@dataclass(frozen=True)
class Archive:
    """A tar file that holds all files of a source, in one of its folders."""

    file: RemoteFile
    folder: str


@dataclass(frozen=True)
class ArchivedSource(Source):
    """A source whose mirrors may hold an archive instead of single files.

    Args:
        title: its name in messages.
        folder: its folder in the cache.
        places: where in a named directory its files may lie.
        mirrors: URLs, each ending in a slash, that hold its archive, or else its files.
        npm: a package that holds its files.
        archive: what mirrors hold in place of single files.
        vouched: whether a ``SHA256SUMS`` in the folder can accept files.
    """

    archive: Archive | None = None
    vouched: bool = False

    @property
    def origins(self) -> tuple[str, ...]:
        """Where a person gets the files by hand."""
        if self.archive is None:
            return super().origins
        name, _ = self.archive.file.published
        packages = [str(self.npm)] * bool(self.npm)
        return (*(f"{mirror}{name}" for mirror in self.mirrors), *packages)

    def attempts(self, files: Sequence[RemoteFile]) -> Iterator[FetchAttempt]:
        """Every way to fetch what a folder lacks."""
        if self.archive is None:
            yield from super().attempts(files)
            return
        for mirror in self.mirrors:
            yield mirror, partial(self._archive_from, mirror, self.archive.file)

    def _archive_from(self, mirror: str, file: RemoteFile, folder: Path) -> None:
        if self.find(file, folder) is None:
            name, md5 = file.published
            download(f"{mirror}{name}", folder / name, md5)


@dataclass(frozen=True)
class Edition:
    """One form of a data set: the files that hold it, and where they come from."""

    source: ArchivedSource
    files: tuple[RemoteFile, ...]

    def locate(self, directory: Path) -> tuple[Path, ...]:
        """Where its files lie, or the archive with all of them; empty if it is not complete."""
        paths = [path for file in self.files if (path := self.source.find(file, directory))]
        if len(paths) == len(self.files):
            return tuple(paths)
        archive = self.source.archive
        path = self.source.find(archive.file, directory) if archive else None
        return (path,) if path else ()


def obtain_first(editions: Sequence[Edition], data: Path | None = None) -> tuple[int, list[bytes]]:
    """The number and the verified contents of the first complete edition.

    It is searched in ``data``, in the directory that ``HARDCONCRETE_DATA`` names, or in the cache,
    and fetched to the cache. Only its own files are opened.

    Example:
        >>> import hashlib, tempfile
        >>> source = ArchivedSource("Digits", "digits", ("",))
        >>> files = [RemoteFile(name, md5_plain=hashlib.md5(b"7").hexdigest()) for name in "ab"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "b").write_bytes(b"7")
        ...     obtain_first([Edition(source, (file,)) for file in files], Path(folder))
        (1, [b'7'])
    """
    number, directory = find_first(editions, data)
    edition = editions[number]
    paths, archive = edition.locate(directory), edition.source.archive
    if archive and edition.source.find(archive.file, directory) in paths:
        return number, _members(editions, edition, archive, paths[0], directory)
    pairs = zip(edition.files, paths, strict=True)
    return number, [_contents(editions, edition, *pair, directory) for pair in pairs]


def find_first(editions: Sequence[Edition], data: Path | None = None) -> tuple[int, Path]:
    """The number of the first complete edition, and its directory; fetched, but not opened.

    Example:
        >>> source = ArchivedSource("Digits", "digits", ("",), ("https://example.org/",))
        >>> labels = RemoteFile("labels", md5_plain="0")
        >>> try:
        ...     find_first([Edition(source, (labels,))], Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(", which")[0])
        labels (or .gz) is not in nowhere (given as data)
    """
    source = editions[0].source
    place = data_folder(source, data)
    complete = [number for number, each in enumerate(editions) if each.locate(place.path)]
    if not complete and place.is_cache:
        _fetch(editions, place.path)
        complete = [number for number, each in enumerate(editions) if each.locate(place.path)]
    if not complete:
        raise _not_found(editions, place)
    return complete[0], place.path


def _fetch(editions: Sequence[Edition], folder: Path) -> None:
    source, files = editions[0].source, editions[0].files
    whole = f", or {source.archive.file}," if source.archive else ""
    attempts = (way for each in editions for way in each.source.attempts(each.files))
    fetch(source, file_names(files) + whole, attempts, folder)


def _origins(editions: Sequence[Edition]) -> list[str]:
    return [origin for each in editions for origin in each.source.origins]


def _not_found(editions: Sequence[Edition], place: DataFolder) -> DataError:
    """Words for the first missing file of the edition of which most is there."""

    def there(each: Edition) -> int:
        return len(each.files) - len(each.source.missing(each.files, place.path))

    nearest = max(editions, key=there)
    source, archive = nearest.source, nearest.source.archive
    file = source.missing(nearest.files, place.path)[0]
    whole = f", or {archive.file} with all of them," if archive else ""
    return not_found_error(source, f"{file}{whole}", place, _origins(editions))


def _contents(
    editions: Sequence[Edition], edition: Edition, file: RemoteFile, path: Path, directory: Path
) -> bytes:
    advice = repair_advice(edition.source, _origins(editions), path)
    if not edition.source.vouched:
        return read_verified(file, path, advice)
    note = f", and no line of a {SUMS} beside it vouches for them"
    return read_verified(file, path, advice, lambda raw: _is_vouched(path, raw, directory), note)


def _members(
    editions: Sequence[Edition], edition: Edition, archive: Archive, path: Path, directory: Path
) -> list[bytes]:
    content = _contents(editions, edition, archive.file, path, directory)
    members = {f"{archive.folder}/{file.name}": file.max_bytes for file in edition.files}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            return [read_member(tar, *member) for member in members.items()]
    except DOWNLOAD_ERRORS as error:
        raise DataError(
            f"{path} is not a tar file with {', '.join(members)} in it\n"
            f"{repair_advice(edition.source, _origins(editions), path)}"
        ) from error


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
