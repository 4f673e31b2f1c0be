"""Checkpoints and dense models that outlive the machine: one archive in a few parts."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

MAX_PART_BYTES = 15_500_000
"""Of a part of the archive."""

MAX_PARTS = 4
"""Of the archive; files of results travel beside them."""

TAR_BYTES = 20_000
"""What an archive adds to each file, and at its end, at most."""


def restore(folder: Path, work: Path) -> None:
    """Put files from the archive where jobs look for them; a file that is there already stays."""
    parts = sorted(folder.glob("kept-*-of-*"))
    if not parts:
        return
    wanted = int(parts[0].name.split("-")[-1])
    if len(parts) != wanted:
        raise FileNotFoundError(f"{folder} has {len(parts)} parts of an archive of {wanted}")
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        for member in tar.getmembers():
            if not (work / member.name).exists():
                tar.extract(member, work, filter="data")


def keep(files: Iterable[Path], folder: Path) -> list[Path]:
    """Write files into an archive, the first ones first; returns those for which it has no room.

    What was in the folder before is replaced.
    """
    room, left = MAX_PARTS * MAX_PART_BYTES, []
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for file in files:
            size = file.stat().st_size + TAR_BYTES
            if size > room:
                left.append(file)
                continue
            room -= size
            tar.add(file, file.name)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("kept-*-of-*"):
        old.unlink()
    if room < MAX_PARTS * MAX_PART_BYTES:
        _write_parts(content.getvalue(), folder)
    return left


def _write_parts(content: bytes, folder: Path) -> None:
    starts = range(0, len(content), MAX_PART_BYTES)
    for number, start in enumerate(starts):
        part = folder / f"kept-{number}-of-{len(starts)}"
        part.write_bytes(content[start : start + MAX_PART_BYTES])
