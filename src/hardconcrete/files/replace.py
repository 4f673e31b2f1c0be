"""Files replaced all at once: a kill or a full disk leaves the old file or the new one."""

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from safetensors import SafetensorError

from hardconcrete.errors import DataError

STALE_SECONDS = 3600.0
"""A temporary file that nobody has written to for so long was left by a write that was killed."""


def replace_file(
    path: Path,
    write: Callable[[Path], object],
    *,
    keep_as: Path | None = None,
    stale_after: float = STALE_SECONDS,
) -> None:
    """Write a file beside its place, then move it there.

    Args:
        path: the file.
        write: writes the content to the path that it gets.
        keep_as: the file that was there before gets this name.
        stale_after: temporary files of this path that are older, in seconds, are removed. Use 0
            where only one process writes the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "note")
        >>> replace_file(path, lambda temporary: temporary.write_text("done"))
        >>> path.read_text(), len([*path.parent.iterdir()])
        ('done', 1)
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path} cannot be written: it is a folder or a device; name a file")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        _remove_stale(path, stale_after)
        write(temporary)
        _flush(temporary)
        if keep_as is not None and path.exists():
            path.replace(keep_as)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} was not written: {_reason(error)}. The file that was there before is safe; "
            "make room or name another folder, then write again"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Add text to a file."""
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise DataError(
            f"{path} was not written: {_reason(error)}. What was in it before is safe"
        ) from error


def read_text(path: Path) -> str:
    """The text of a file."""
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    try:
        return path.read_text()
    except (OSError, ValueError) as error:  # ValueError: bytes that are not text
        raise DataError(f"{path} cannot be read: {_reason(error)}") from error


def _remove_stale(path: Path, older_than: float) -> None:
    """Remove what killed writes of this file have left."""
    for left in path.parent.glob(f".{escape(path.name)}.{'?' * 32}.tmp"):
        with suppress(FileNotFoundError):  # another write may remove it, too
            if time.time() - left.stat().st_mtime >= older_than:
                left.unlink()


def _flush(path: Path) -> None:
    """Wait until the content is on the disk, so that a power cut leaves no empty file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _reason(error: Exception) -> str:
    """Why the system refused, in one line."""
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]
