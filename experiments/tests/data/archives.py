"""Archives of one's own making, and sources that have them."""

import io
import tarfile

from hardconcrete.demo.data import Package, RemoteFile
from hardconcrete_paper.data.sources import Archive, ArchivedSource
from tests.demo.published import md5


def archived_source(
    *mirrors: str, npm: str | None = None, archive: Archive | None = None
) -> ArchivedSource:
    package = Package(npm, "package/data") if npm else None
    return ArchivedSource("Tiny", "tiny", ("", "tiny", "Tiny/raw"), mirrors, package, archive)


def archived(contents: dict[str, bytes]) -> tuple[bytes, Archive]:
    """An archive ``all.tar.gz`` with a folder ``inside``, and its description."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"inside/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    packed = raw.getvalue()
    return packed, Archive(RemoteFile("all.tar", md5_gz=md5(packed)), "inside")
