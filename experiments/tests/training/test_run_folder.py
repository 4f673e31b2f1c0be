import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hardconcrete.errors import ArgumentError, DataError, HardConcreteWarning
from hardconcrete_paper.training.run_folder import CHECKPOINT, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.begin({"seed": 0, "epochs": 3}, resume=False)
    return folder


def test_a_folder_is_not_overwritten(folder: RunFolder) -> None:
    with pytest.raises(ArgumentError, match="holds this run already; continue it with --resume"):
        folder.begin({"seed": 0, "epochs": 3}, resume=False)
    folder.begin({"seed": 0, "epochs": 3}, resume=True)


def test_other_settings_cannot_continue_it(folder: RunFolder) -> None:
    with pytest.raises(
        ArgumentError, match="holds a run with epochs=3, which cannot continue with 4"
    ):
        folder.begin({"seed": 0, "epochs": 4}, resume=True)


def test_a_record_from_before_an_option_existed_has_it_off(folder: RunFolder) -> None:
    folder.refuse_others({**folder.read()["settings"], "shrink": 0, "macs": None})
    with pytest.raises(ArgumentError, match="shrink=None, which cannot continue with 3"):
        folder.refuse_others({**folder.read()["settings"], "shrink": 3})


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


def test_without_a_checkpoint_the_metrics_begin_anew(folder: RunFolder) -> None:
    folder.log({"epoch": 1})
    assert folder.load() is None
    assert folder.lines() == []


def test_an_unfinished_line_and_a_damaged_record(folder: RunFolder) -> None:
    folder.log({"epoch": 1})
    folder.metrics.write_text(folder.metrics.read_text() + '{"epoch": 2, "lo')
    folder.save({"a": torch.zeros(1)}, epoch=1, seconds=0.0)
    assert folder.load()[1] == 1
    assert folder.lines() == [{"epoch": 1}]
    folder.record.write_text('{"settings": ')
    with pytest.raises(DataError, match=r"record.json is damaged .* delete its folder"):
        folder.begin({"seed": 0, "epochs": 3}, resume=True)
    assert not folder.has_been_tested()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "names no settings"),
        ('{"settings": 5}', "names no settings"),
        ("[]", "not an object"),
    ],
)
def test_a_record_of_something_else_is_damaged(folder: RunFolder, text: str, why: str) -> None:
    folder.record.write_text(text)
    with pytest.raises(DataError, match=f"record.json is damaged .*{why}"):
        folder.refuse_others({"seed": 0})


def test_metrics_that_cannot_be_read_are_damaged(folder: RunFolder) -> None:
    for content in (b"epoch 1\n", b"\xff\n"):
        folder.metrics.write_bytes(content)
        with pytest.raises(DataError, match=r"metrics.jsonl is damaged"):
            folder.lines()


def test_a_checkpoint_of_something_else_is_damaged(folder: RunFolder) -> None:
    save_file({"a": torch.zeros(1)}, folder.checkpoint)
    with pytest.raises(DataError, match="is damaged"):
        folder.load()


def test_a_failed_write_leaves_the_old_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.save({"a": torch.zeros(2)}, epoch=1, seconds=0.0)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hardconcrete.files.tensors.save_file", fail)
    with pytest.raises(DataError, match="was not written: disk full"):
        folder.save({"a": torch.ones(2)}, epoch=2, seconds=0.0)
    assert folder.load()[1] == 1


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin({"seed": 0}, resume=False)
    folder.note_environment({"torch": "2.11"})
    assert folder.read() == {"settings": {"seed": 0}, "environment": {"torch": "2.11"}}
    folder.note_environment({"torch": "2.13"})
    assert folder.read()["environment"] == {"torch": "2.11"}
    assert folder.read()["resumed"] == [{"torch": "2.13"}]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 64
    path.write_bytes(bytes(content))


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(folder: RunFolder) -> None:
    for epoch in (1, 2):
        folder.log({"epoch": epoch})
        folder.save({"a": torch.full((4,), float(epoch))}, epoch=epoch, seconds=0.0)
    flip(folder.checkpoint, -1)  # an exponent: 2 would be 1e38
    with pytest.warns(HardConcreteWarning, match=r"altered.*continues from checkpoint.previous"):
        state, epoch, _ = folder.load()
    assert (state["a"].tolist(), epoch) == ([1.0] * 4, 1)
    assert folder.lines() == [{"epoch": 1}]
    flip(folder.previous, -1)
    with pytest.raises(DataError, match=r"checkpoint.safetensors is damaged .*altered"):
        folder.load()


def test_a_kill_between_two_renames_leaves_the_checkpoint_before(folder: RunFolder) -> None:
    for epoch in (1, 2):
        folder.save({"a": torch.zeros(1)}, epoch=epoch, seconds=0.0)
    folder.checkpoint.unlink()
    assert folder.load()[1] == 1


def test_words_about_a_checkpoint_are_under_the_checksum(folder: RunFolder) -> None:
    folder.save({"a": torch.zeros(1)}, epoch=1, seconds=0.0)
    content = folder.checkpoint.read_bytes()
    folder.checkpoint.write_bytes(content.replace(b'epoch\\": 1', b'epoch\\": 9'))
    assert folder.checkpoint.read_bytes() != content
    with pytest.raises(DataError, match="its content does not match its checksum"):
        folder.load()


@pytest.mark.parametrize(
    "about", ['{"epoch": "99", "seconds": 0}', '{"epoch": -1, "seconds": 0}', "{}", "[]", "{",
              '{"epoch": 1, "seconds": NaN}', "[" * 100_000],
)  # fmt: skip
def test_forged_words_about_a_checkpoint(folder: RunFolder, about: str) -> None:
    CHECKPOINT.write(folder.checkpoint, {"a": torch.zeros(1)}, about)
    with pytest.raises(DataError, match=r"checkpoint.safetensors is damaged"):
        folder.load()


@pytest.mark.parametrize("line", ["{}", '{"epoch": "2"}', '{"epoch": null}', "5", "[" * 100_000])
def test_forged_metrics(folder: RunFolder, line: str) -> None:
    folder.metrics.write_text(f"{line}\n")
    with pytest.raises(DataError, match=r"metrics.jsonl is damaged"):
        folder.load()


def test_odd_files_in_the_place_of_those_of_a_run(folder: RunFolder) -> None:
    for path in (folder.checkpoint, folder.metrics):
        path.mkdir()
        with pytest.raises(DataError, match=f"{path.name} is damaged .*is not a file"):
            folder.load()
        path.rmdir()
    with pytest.raises(DataError, match="inside cannot be made: Not a directory"):
        RunFolder(folder.record / "inside").begin({}, resume=False)


def test_a_folder_that_vanishes(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)
    for write in (
        lambda: folder.log({"epoch": 1}),
        lambda: folder.write({}),
        lambda: folder.save({"a": torch.zeros(1)}, epoch=1, seconds=0.0),
    ):
        with pytest.raises(DataError, match=r"was not written: .*No such file"):
            write()
