"""The files of a run: a record, metrics by epoch, and a checkpoint. Nothing is unpickled."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hardconcrete.errors import ArgumentError, DataError
from hardconcrete_paper.training.processes import rank


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

    def small(self, seed: int) -> Path:
        """The compacted model of a seed."""
        return self.path / f"small-{seed}.safetensors"

    def snapshot(self, epoch: int, seed: int, state: dict[str, Tensor]) -> None:
        """Save a network after an epoch. The tensors must not change meanwhile."""
        path = self._snapshot(epoch, seed)
        path.parent.mkdir(exist_ok=True)
        _save(state, path)

    def snapshots(self, seed: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The saved networks of a seed, with their epochs."""
        for path in sorted(self.path.glob(f"snapshots/*-{seed}.safetensors")):
            yield int(path.name.split("-")[0]), _read(path)[0]

    def _snapshot(self, epoch: int, seed: int) -> Path:
        return self.path / "snapshots" / f"{epoch:04d}-{seed}.safetensors"

    def begin(self, settings: dict[str, Any], *, resume: bool) -> None:
        """Claim the folder for these settings, or continue in it."""
        if not self.record.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            for file in (self.metrics, self.checkpoint, *self.path.glob("snapshots/*")):
                file.unlink(missing_ok=True)
            self.write({"settings": settings})
            return
        self.refuse_others(settings)
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
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """All metrics so far, without an unfinished last line."""
        if not self.metrics.exists():
            return []
        return _parsed(self.metrics, lambda text: text.rpartition("\n")[0].splitlines())

    def save(self, tensors: dict[str, Tensor], epoch: int, seconds: float) -> None:
        """Replace the checkpoint. The tensors must not change meanwhile."""
        _save(tensors, self.checkpoint, {"epoch": str(epoch), "seconds": repr(seconds)})

    def load(self) -> tuple[dict[str, Tensor], int, float] | None:
        """Tensors, epoch and seconds of the checkpoint; metrics of later epochs are dropped."""
        checkpoint = self._checkpoint() if self.checkpoint.exists() else None
        epoch = 0 if checkpoint is None else checkpoint[1]
        if rank() == 0:  # one process writes
            kept = [line for line in self.lines() if line["epoch"] <= epoch]
            _replace(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        return checkpoint

    def _checkpoint(self) -> tuple[dict[str, Tensor], int, float]:
        tensors, about = _read(self.checkpoint)
        try:
            return tensors, int(about["epoch"]), float(about["seconds"])
        except KeyError as error:
            raise _damaged(self.checkpoint, error) from error


def _save(tensors: dict[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write tensors that share no memory, all at once: a kill leaves the old file or the new."""
    temporary = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, about)
    temporary.replace(path)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, TypeError) as error:
        raise _damaged(path, error) from error


def _parsed(path: Path, parts: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """The JSON objects in a file."""
    try:
        rows = [json.loads(text) for text in parts(path.read_text())]
    except ValueError as error:  # also for bytes that are not text
        raise _damaged(path, error) from error
    if not all(isinstance(one, dict) for one in rows):
        raise _damaged(path, "not an object of JSON")
    return rows


def _damaged(path: Path, error: Exception | str) -> DataError:
    return DataError(f"{path} is damaged ({error}); delete its folder to begin this run anew")


def _replace(path: Path, text: str) -> None:
    """Write a file all at once: a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
