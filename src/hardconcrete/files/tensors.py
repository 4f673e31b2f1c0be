"""Files of tensors with a text and a checksum of both, in the safetensors format."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hardconcrete.errors import DataError
from hardconcrete.files.replace import STALE_SECONDS, replace_file

HEADER_SIZE_BYTES = 8
"""A safetensors file begins with the length of its header, in so many bytes."""

MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""


@dataclass(frozen=True)
class TensorFile:
    """A kind of file. Nothing in it is unpickled.

    Args:
        format: its name, which every file of the kind carries.
        version: of the format.
        text_key: the name of the text among the metadata.
        writer: what writes such files, for messages.

    Example:
        >>> import tempfile
        >>> kind = TensorFile("example", "1", "note", "this example")
        >>> path = Path(tempfile.mkdtemp(), "file")
        >>> kind.write(path, {"weight": torch.ones(2)}, "a text")
        >>> kind.read(path)
        ({'weight': tensor([1., 1.])}, 'a text')
    """

    format: str
    version: str
    text_key: str
    writer: str

    def write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        text: str,
        *,
        keep_as: Path | None = None,
        stale_after: float = STALE_SECONDS,
    ) -> None:
        """Replace the file; see ``replace_file``. The tensors are on the CPU and share no memory.

        Args:
            path: the file.
            tensors: by name; none has NaN in it.
            text: is read together with them.
            keep_as: the file that was there before gets this name.
            stale_after: seconds after which temporary files of this path are removed.
        """
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        _refuse_nan(tensors, f"{path} was not written")
        about = {"format": self.format, "version": self.version, self.text_key: text}
        about["sha256"] = digest(tensors, text)
        replace_file(
            path,
            lambda temporary: save_file(tensors, temporary, about),
            keep_as=keep_as,
            stale_after=stale_after,
        )

    def read(
        self, path: Path, max_header_bytes: int = MAX_HEADER_BYTES
    ) -> tuple[dict[str, Tensor], str]:
        """The tensors and the text, if the file is complete, unaltered and without NaN.

        Args:
            path: the file.
            max_header_bytes: a longer header, which has the text, is refused unread.
        """
        self._refuse_odd_file(path, max_header_bytes)
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                self._refuse_another_format(path, about)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is truncated or no safetensors file ({error})") from error
        text = about.get(self.text_key, "")
        if digest(tensors, text) != about.get("sha256"):
            raise DataError(f"{path} was altered: its content does not match its checksum")
        _refuse_nan(tensors, f"{path} is not usable")
        return tensors, text

    def _refuse_odd_file(self, path: Path, max_header_bytes: int) -> None:
        """Refuse what is no file, and a header that is too long to be one of this kind."""
        if not path.is_file():
            raise DataError(f"{path} is not a file; pass a file that {self.writer} wrote")
        try:
            with path.open("rb") as file:
                header = int.from_bytes(file.read(HEADER_SIZE_BYTES), "little")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        room = path.stat().st_size - HEADER_SIZE_BYTES
        if max_header_bytes < header <= room:  # a longer one than the file is a truncated file
            raise DataError(
                f"{path} has a header of {header:,} bytes, and at most {max_header_bytes:,} are "
                "expected here; it is for a larger model, or was not written by "
                f"{self.writer}"
            )

    def _refuse_another_format(self, path: Path, about: dict[str, str]) -> None:
        if about.get("format") != self.format:
            raise DataError(
                f"{path} was not written by {self.writer}: it carries no {self.text_key}"
            )
        if about.get("version") != self.version:
            raise DataError(
                f"{path} has version {about.get('version')} of the format, and this hardconcrete "
                f"reads version {self.version}; use the release that wrote it, or write it again"
            )


def digest(tensors: dict[str, Tensor], text: str) -> str:
    """The checksum of tensors and a text: of every name, type, shape and byte."""
    checksum = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _refuse_nan(tensors: dict[str, Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise DataError(f"{what}: {name} has NaN in it; go back to a model without")
