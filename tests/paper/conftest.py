from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from hardconcrete.paper import download, examination, mnist, table1, training, wide_run
from hardconcrete.paper.datasets import Images
from hardconcrete.paper.learner import Recipe
from tests.paper.published import Mirror, handler


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "*")
    mirror = Mirror()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(mirror)) as server:
        mirror.url = f"http://127.0.0.1:{server.server_port}/"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield mirror
        server.shutdown()
        thread.join()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No directory is named, the cache is empty, no npm is on the PATH, nobody waits."""
    monkeypatch.delenv("HARDCONCRETE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """A few made-up images stand in for MNIST; the splits that were opened, in order.

    Two batches to train on, or what a test asks for; a sweep is timed on six.
    """
    splits: list[str] = []

    def load(batches: int, split: str, data: Path | None = None) -> Images:  # noqa: ARG001
        splits.append(split)
        count = 100 * batches if split == "train" else 40
        generator = torch.Generator().manual_seed(len(split))
        images = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return Images(images, torch.arange(count) % 10, "noise")

    monkeypatch.setattr(mnist, "load_mnist", partial(load, getattr(request, "param", 2)))
    monkeypatch.setattr(table1, "load_mnist", partial(load, 6))
    monkeypatch.setattr(mnist, "find_mnist", lambda *_: None)
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(examination, "TUNING", Recipe(epochs=1))
    monkeypatch.setattr(examination, "LATENCY_BATCH", 4)
    monkeypatch.setattr(examination, "LATENCY_REPEATS", 3)
    return splits


@pytest.fixture
def opened_cifar(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same for CIFAR."""
    return stand_in_for_cifar(monkeypatch)


def stand_in_for_cifar(patch: pytest.MonkeyPatch) -> list[str]:
    """Put made-up images where CIFAR is read; networks do not mind that they are small."""
    splits: list[str] = []

    def load(classes: int, split: str, data: Path | None = None) -> Images:  # noqa: ARG001
        splits.append(split)
        count = 256 if split == "train" else 40
        generator = torch.Generator().manual_seed(len(split))
        images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
        return Images(images, torch.arange(count) % classes, "noise")

    patch.setattr(wide_run, "load_cifar", load)
    patch.setattr(wide_run, "find_cifar", lambda *_: None)
    patch.setattr(wide_run, "BATCHES", 2)
    patch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    return splits
