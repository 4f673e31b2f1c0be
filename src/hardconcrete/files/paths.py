"""Paths that callers pass."""

import os
from pathlib import Path

from hardconcrete.errors import ArgumentError


def as_path(path: object, name: str = "path") -> Path:
    """A path as the caller passed it, or a refusal that names the argument.

    Example:
        >>> try:
        ...     as_path(None, "out")
        ... except ArgumentError as error:
        ...     print(error)
        out is a NoneType; it takes a str or a pathlib.Path
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{name} is a {type(path).__name__}; it takes a str or a pathlib.Path")
    if "\0" in os.fsdecode(path):
        raise ArgumentError(f"{name} has a zero byte in it, which no file name can have")
    return Path(os.fsdecode(path))
