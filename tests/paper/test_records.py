from pathlib import Path

import pytest
import torch

from hardconcrete.errors import ArgumentError, DataError
from hardconcrete.paper import records
from hardconcrete.paper.records import RunFolder, environment


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.begin({"seed": 0, "epochs": 3}, resume=False)
    return folder


def test_a_folder_is_not_overwritten(folder: RunFolder) -> None:
    with pytest.raises(ArgumentError, match="holds a run already; continue it with --resume"):
        folder.begin({"seed": 0, "epochs": 3}, resume=False)
    folder.begin({"seed": 0, "epochs": 3}, resume=True)


def test_other_settings_cannot_continue_it(folder: RunFolder) -> None:
    with pytest.raises(ArgumentError, match="begun with epochs=3 and cannot continue with 4"):
        folder.begin({"seed": 0, "epochs": 4}, resume=True)


def test_checkpoints_come_back_and_later_metrics_go(folder: RunFolder) -> None:
    assert folder.load() is None
    for epoch in (1, 2, 3):
        folder.log({"epoch": epoch, "loss": 1 / epoch})
    state = {"a": torch.randn(3), "b": torch.randn(4, 2).t(), "step": torch.tensor(7.0)}
    folder.save(state, epoch=2, seconds=1.25)
    loaded, epoch, seconds = folder.load()
    assert (epoch, seconds) == (2, 1.25)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert [line["epoch"] for line in folder.lines()] == [1, 2]


def test_a_damaged_checkpoint_is_named(folder: RunFolder) -> None:
    folder.save({"a": torch.zeros(100)}, epoch=1, seconds=0.0)
    folder.checkpoint.write_bytes(folder.checkpoint.read_bytes()[:100])
    with pytest.raises(DataError, match=r"checkpoint.safetensors is damaged .* delete it"):
        folder.load()


def test_a_failed_write_leaves_the_old_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.save({"a": torch.zeros(2)}, epoch=1, seconds=0.0)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(records, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.save({"a": torch.ones(2)}, epoch=2, seconds=0.0)
    assert folder.load()[1] == 1


def test_the_environment_names_versions_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["device"].endswith("CPU cores")

    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(records.subprocess, "run", no_git)
    assert environment(torch.device("cpu"))["commit"] is None
