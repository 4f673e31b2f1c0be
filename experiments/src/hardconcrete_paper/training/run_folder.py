"""The files of a run: a record, metrics by epoch, and a checkpoint. Nothing is unpickled."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from hardconcrete.errors import ArgumentError, DataError, HardConcreteWarning
from hardconcrete.files import TensorFile, append_text, read_text, replace_file
from hardconcrete_paper.training.processes import rank

CHECKPOINT = TensorFile("hardconcrete.checkpoint", "1", "about", "hardconcrete-paper")

Checkpoint = tuple[dict[str, Tensor], int, float]
"""Tensors, epoch and seconds."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Example:
        >>> import tempfile, torch
        >>> folder = RunFolder(Path(tempfile.mkdtemp()))
        >>> folder.begin({"seed": 0}, resume=False)
        >>> folder.log({"epoch": 1, "loss": 0.5})
        >>> folder.save({"weight": torch.zeros(2)}, epoch=1, seconds=2.5)
        >>> folder.load()
        ({'weight': tensor([0., 0.])}, 1, 2.5)
    """

    path: Path

    @property
    def record(self) -> Path:
        """Settings, environment and result."""
        return self.path / "record.json"

    @property
    def metrics(self) -> Path:
        """One line of JSON per epoch and network."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """Every tensor that training changes."""
        return self.path / "checkpoint.safetensors"

    @property
    def previous(self) -> Path:
        """The checkpoint before the last one."""
        return self.path / "checkpoint.previous.safetensors"

    def small(self, seed: int) -> Path:
        """The compacted model of a seed."""
        return self.path / f"small-{seed}.safetensors"

    def snapshot(self, epoch: int, seed: int, state: dict[str, Tensor]) -> None:
        """Save a network after an epoch. The tensors must not change meanwhile."""
        path = self._snapshot(epoch, seed)
        _make(path.parent)
        CHECKPOINT.write(path, state, "{}", stale_after=0)

    def snapshots(self, seed: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The saved networks of a seed, with their epochs."""
        for path in sorted(self.path.glob(f"snapshots/*-{seed}.safetensors")):
            yield int(path.name.split("-")[0]), _tensors(path)[0]

    def _snapshot(self, epoch: int, seed: int) -> Path:
        return self.path / "snapshots" / f"{epoch:04d}-{seed}.safetensors"

    def begin(self, settings: dict[str, Any], *, resume: bool) -> None:
        """Claim the folder for these settings, or continue in it."""
        if not self.record.exists():
            _make(self.path)
            old = self.metrics, self.checkpoint, self.previous, *self.path.glob("snapshots/*")
            for file in old:
                file.unlink(missing_ok=True)
            self.write({"settings": settings})
            return
        self.refuse_others(settings)
        for left in self.path.glob(".*.tmp"):  # by writes of this run that were killed
            left.unlink(missing_ok=True)
        if not resume:
            raise ArgumentError(
                f"{self.path} holds this run already; continue it with --resume, choose another "
                "--out, or delete it"
            )

    def refuse_others(self, settings: dict[str, Any]) -> None:
        """Refuse a folder that holds a run with other settings.

        A setting that a record lacks is newer than the record, and counts as off.
        """
        before = self.read()["settings"] if self.record.exists() else settings
        for key in {*before, *settings}:
            if (before.get(key) or None) != (settings.get(key) or None):
                raise ArgumentError(
                    f"{self.path} holds a run with {key}={before.get(key)!r}, which cannot "
                    f"continue with {settings.get(key)!r}; choose another folder for the runs"
                )

    def read(self) -> dict[str, Any]:
        """The record."""
        (content,) = _parsed(self.record, lambda text: [text])
        if not isinstance(content.get("settings"), dict):
            raise _damaged(self.record, "it names no settings")
        return content

    def write(self, record: dict[str, Any]) -> None:
        """Replace the record, all at once."""
        _replace(self.record, json.dumps(record, indent=2) + "\n")

    def note_environment(self, now: dict[str, Any]) -> None:
        """Record the environment of the training, and of each continuation."""
        record = self.read()
        if "environment" in record:
            record["resumed"] = [*record.get("resumed", []), now]
        self.write({"environment": now, **record})

    def note_opening(self) -> None:
        """Record that the test set is opened now."""
        record, now = self.read(), datetime.now(UTC).isoformat(timespec="seconds")
        self.write({**record, "test_opened": [*record.get("test_opened", []), now]})

    def has_been_tested(self) -> bool:
        """Whether the test set was opened for this run; False if the record cannot be read."""
        try:
            record = self.read() if self.record.exists() else {"settings": {}}
        except DataError:
            return False
        return bool(record.get("test_opened")) and not record["settings"].get("validate")

    def log(self, line: dict[str, Any]) -> None:
        """Add a line of metrics."""
        append_text(self.metrics, json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """All metrics so far, without an unfinished last line."""
        if not self.metrics.exists():
            return []
        lines = _parsed(self.metrics, lambda text: text.rpartition("\n")[0].splitlines())
        if not all(_is_count(line.get("epoch")) for line in lines):
            raise _damaged(self.metrics, "a line has no epoch")
        return lines

    def save(self, tensors: dict[str, Tensor], epoch: int, seconds: float) -> None:
        """Replace the checkpoint, and keep the one before. Tensors must not change meanwhile."""
        about = json.dumps({"epoch": epoch, "seconds": seconds})
        CHECKPOINT.write(self.checkpoint, tensors, about, keep_as=self.previous, stale_after=0)

    def load(self) -> Checkpoint | None:
        """Tensors, epoch and seconds of the checkpoint; metrics of later epochs are dropped.

        If the last checkpoint cannot be read, a warning says so and the one before is loaded.
        """
        checkpoint = self._latest()
        epoch = 0 if checkpoint is None else checkpoint[1]
        if rank() == 0:  # one process writes
            kept = [line for line in self.lines() if line["epoch"] <= epoch]
            _replace(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        return checkpoint

    def _latest(self) -> Checkpoint | None:
        damage = []
        for file in (self.checkpoint, self.previous):
            if not file.exists():  # a kill between two renames leaves the previous one only
                continue
            try:
                checkpoint = _checkpoint(file)
            except DataError as error:
                damage.append(error)
                continue
            if damage:
                warnings.warn(
                    f"{damage[0]}. The run continues from {file.name}, which is of epoch "
                    f"{checkpoint[1]}",
                    HardConcreteWarning,
                    stacklevel=3,
                )
            return checkpoint
        if damage:
            raise damage[0]
        return None


def _checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose epoch and seconds are what they should be."""
    tensors, about = _tensors(path)
    epoch, seconds = about.get("epoch"), about.get("seconds")
    if not _is_count(epoch) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise _damaged(path, f"epoch is {epoch!r} and seconds is {seconds!r}")
    return tensors, epoch, float(seconds)


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what it says about them."""
    try:
        tensors, about = CHECKPOINT.read(path)
    except DataError as error:
        raise _damaged(path, error) from error
    (content,) = _objects(path, [about])
    return tensors, content


def _parsed(path: Path, parts: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """The JSON objects in a file."""
    try:
        text = read_text(path)
    except DataError as error:
        raise _damaged(path, error) from error
    return _objects(path, parts(text))


def _objects(path: Path, texts: list[str]) -> list[dict[str, Any]]:
    try:
        objects = [json.loads(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not all(isinstance(each, dict) for each in objects):
        raise _damaged(path, "not an object of JSON")
    return objects


def _is_count(number: Any) -> TypeGuard[int]:
    return type(number) is int and number >= 0


def _damaged(path: Path, error: Exception | str) -> DataError:
    return DataError(f"{path} is damaged ({error}); delete its folder to begin this run anew")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be made: {error.strerror}; choose another folder for the runs"
        ) from error


def _replace(path: Path, text: str) -> None:
    replace_file(path, lambda temporary: temporary.write_text(text), stale_after=0)
