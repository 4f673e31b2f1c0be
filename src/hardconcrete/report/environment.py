"""Where a number was made."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import hardconcrete


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit: what is needed to read a number later.

    Example:
        >>> import torch
        >>> sorted(environment(torch.device("cpu")))
        ['commit', 'date', 'device', 'hardconcrete', 'python', 'threads', 'torch']
    """
    on_gpu = device.type == "cuda"
    return {
        "hardconcrete": hardconcrete.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{os.cpu_count()} CPU cores",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The value of HARDCONCRETE_COMMIT, or the commit of the checkout that holds this file.

    The commit is marked if the checkout has changes.
    """
    root, named = Path(__file__).parents[3], os.environ.get("HARDCONCRETE_COMMIT")
    if named or not (root / ".git").exists() or not (root / "src/hardconcrete").is_dir():
        return named or None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
