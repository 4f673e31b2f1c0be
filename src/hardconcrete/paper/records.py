"""What a run leaves behind: a record, metrics by epoch, and a checkpoint. Nothing is unpickled."""

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import hardconcrete
from hardconcrete.errors import ArgumentError, DataError


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit: what is needed to read a number later.

    Example:
        >>> import torch
        >>> sorted(environment(torch.device("cpu")))
        ['commit', 'date', 'device', 'hardconcrete', 'python', 'torch']
    """
    on_gpu = device.type == "cuda"
    return {
        "hardconcrete": hardconcrete.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{os.cpu_count()} CPU cores",
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of a checkout; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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

    def begin(self, settings: dict[str, Any], *, resume: bool) -> None:
        """Claim the folder for these settings, or continue in it."""
        if not self.record.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self.write({"settings": settings})
            self.metrics.unlink(missing_ok=True)
            self.checkpoint.unlink(missing_ok=True)
            return
        if not resume:
            raise ArgumentError(
                f"{self.path} holds a run already; continue it with --resume, choose another "
                "--out, or delete it"
            )
        before = self.read()["settings"]
        for key in {*before, *settings}:
            if before.get(key) != settings.get(key):
                raise ArgumentError(
                    f"{self.path} was begun with {key}={before.get(key)!r} and cannot continue "
                    f"with {settings.get(key)!r}; use the same settings or another --out"
                )

    def read(self) -> dict[str, Any]:
        """The record."""
        content: dict[str, Any] = json.loads(self.record.read_text())
        return content

    def write(self, record: dict[str, Any]) -> None:
        """Replace the record, all at once."""
        temporary = self.record.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(self.record)

    def log(self, line: dict[str, Any]) -> None:
        """Add a line of metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """All metrics so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def save(self, tensors: dict[str, Tensor], epoch: int, seconds: float) -> None:
        """Replace the checkpoint, all at once: a kill leaves the old one or the new one."""
        temporary = self.checkpoint.with_suffix(".tmp")
        copies = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(copies, temporary, {"epoch": str(epoch), "seconds": repr(seconds)})
        temporary.replace(self.checkpoint)

    def load(self) -> tuple[dict[str, Tensor], int, float] | None:
        """Tensors, epoch and seconds of the checkpoint; metrics of later epochs are dropped."""
        if not self.checkpoint.exists():
            return None
        try:
            with safe_open(self.checkpoint, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = file.metadata()
        except SafetensorError as error:
            raise DataError(
                f"{self.checkpoint} is damaged ({error}); delete it to begin this run anew"
            ) from error
        epoch = int(about["epoch"])
        kept = [line for line in self.lines() if line["epoch"] <= epoch]
        self.metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
        return tensors, epoch, float(about["seconds"])
