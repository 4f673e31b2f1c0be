"""Rows of table 2 at a small size, on a few made-up images."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from experiments.tests.cifar.test_experiment import small
from experiments.tests.mnist.test_table1 import RESULTS, interrupt
from hardconcrete.errors import ArgumentError, DataError
from hardconcrete_paper.cifar import examination
from hardconcrete_paper.cifar import run as module
from hardconcrete_paper.cifar.examination import CifarResult
from hardconcrete_paper.cifar.experiment import CifarExperiment
from hardconcrete_paper.cifar.run import run
from hardconcrete_paper.data import cifar as cifar_images
from hardconcrete_paper.training.engine import Engine
from hardconcrete_paper.training.run_folder import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:the training ended above its budget")


@pytest.mark.parametrize(
    "experiment",
    [
        small(variant="dense"),
        small(variant="dropout"),
        small(dataset="cifar100"),
        small(paper_gates=True),
        small(variant="budget"),
        small(variant="budget", params=0.4),
        small(variant="budget", shrink=1, noise=True, epochs=4, gate_lr=4.0),
        small(variant="budget", shrink=1, swa=0.25, epochs=4, gate_lr=4.0),
        CifarExperiment(network="resnet-8", epochs=1),
        CifarExperiment(network="preact-8", epochs=1, variant="dense"),
    ],
    ids=lambda experiment: experiment.name,
)
def test_every_kind_of_row_is_trained_and_tested_once(
    experiment: CifarExperiment, opened_cifar: list[str], tmp_path: Path
) -> None:
    result = run(experiment, out=tmp_path, device="cpu")
    assert opened_cifar == ["train", "test"]
    assert 0 < result.error <= 100
    assert result.images_per_second > 0
    assert result.macs[0] <= result.macs[1]
    assert [*result.curve] == [str(epoch) for epoch in range(1, experiment.epochs + 1)]
    assert [*result.latency] == ["cpu, float32, batch 1"]
    assert result.seconds_in_all > result.seconds
    if experiment.variant == "budget":
        for cost, part in experiment.limits.items():
            own, dense = getattr(result, cost)
            assert own <= part * dense
        assert len(result.units) == 3
        assert all(units % 8 == 0 for units in result.units)
    folder = RunFolder(tmp_path / experiment.name)
    state, _, _ = folder.load()
    assert ("seed0.model.gates.original" in state) == bool(experiment.shrink)  # units have gone
    record = folder.read()
    assert record["tested_on"] == "test set"
    assert len(record["test_opened"]) == 1
    assert run(experiment, out=tmp_path, resume=True) == result
    assert opened_cifar == ["train", "test"]


@pytest.mark.unwatched
@pytest.mark.usefixtures("opened_cifar")
@pytest.mark.parametrize(
    "settings", [{}, {"variant": "dropout", "swa": 0.3, "epochs": 4}], ids=["l0", "dropout"]
)
def test_a_run_in_pieces_is_the_run_in_one(settings: dict, tmp_path: Path) -> None:
    experiment = small(**settings)
    whole = run(experiment, out=tmp_path / "whole", device="cpu")
    pieces = tmp_path / "pieces"
    for piece in range(1, experiment.epochs):
        assert run(experiment, out=pieces, device="cpu", resume=piece > 1, minutes=0.0) is None
    result = run(experiment, out=pieces, device="cpu", resume=True, minutes=60.0)
    assert result.error == whole.error
    assert result.curve == whole.curve
    assert result.expected_macs == whole.expected_macs
    folders = [RunFolder(out / experiment.name) for out in (tmp_path / "whole", pieces)]
    assert folders[0].read()["forecast"] == folders[1].read()["forecast"]  # of the beginning
    states = [folder.load()[0] for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    if experiment.swa:
        assert states[0]["seed0.epochs_in_mean"] == 3


@pytest.mark.unwatched
@pytest.mark.parametrize("where", ["latencies", "_curves"])
def test_an_interrupted_examination_is_continued(
    where: str, opened_cifar: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small(variant="budget", epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(examination, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, out=tmp_path, device="cpu")
    folder = RunFolder(tmp_path / experiment.name)
    first = folder.read()
    with pytest.raises(ArgumentError, match="holds this run already; continue it with --resume"):
        run(experiment, out=tmp_path, device="cpu")
    result = run(experiment, out=tmp_path, device="cpu", resume=True)
    assert [*result.curve] == ["1"]
    assert [*result.latency] == ["cpu, float32, batch 1"]
    done = {key: value for key, value in first["result"].items() if value}
    assert CifarResult.of({**asdict(result), **done}) == result  # nothing was measured twice
    assert len(folder.read()["test_opened"]) == opened_cifar.count("test") == 2
    assert folder.read()["environment"] == first["environment"]
    assert run(experiment, out=tmp_path) == result
    assert opened_cifar.count("test") == 2


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_minutes_that_are_none_are_refused(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="must be a number of minutes"):
        run(small(), out=tmp_path, device="cpu", minutes=minutes)


@pytest.mark.usefixtures("opened_cifar")
def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"--macs 0.02 is too small"):
            run(small(variant="budget", macs=0.02), out=tmp_path / "runs", device="cpu")
    assert not (tmp_path / "runs").exists()


def test_missing_test_files_are_noticed_before_the_training(
    opened_cifar: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_cifar", cifar_images.find_cifar)
    with pytest.raises(DataError, match=r"test_batch.bin .* is not in"):
        run(small(), out=tmp_path / "runs", data=tmp_path, device="cpu")
    assert not (tmp_path / "runs").exists()
    assert opened_cifar == ["train"]


def test_a_result_without_a_checkpoint_is_final(tmp_path: Path) -> None:
    kept = RESULTS / "wide" / CifarExperiment().name
    shutil.copytree(kept, tmp_path / kept.name)
    assert run(CifarExperiment(), out=tmp_path, resume=True).error == 3.89


@pytest.mark.unwatched
@pytest.mark.usefixtures("opened_cifar")
def test_a_shrunk_network_goes_on_and_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, build = [], Engine.build
    monkeypatch.setattr(Engine, "build", lambda engine: (builds.append(engine), build(engine)))
    experiment = small(variant="budget", shrink=1, epochs=4, gate_lr=4.0)
    whole = run(experiment, out=tmp_path / "whole", device="cpu")
    shrinks, pieces, result = len(builds) - 1, 0, None
    while result is None:
        out = tmp_path / "pieces"
        result = run(experiment, out=out, device="cpu", resume=pieces > 0, minutes=0.0)
        pieces += 1
    assert pieces == 4
    assert shrinks > 0
    assert len(builds) == 1 + shrinks + pieces + shrinks
    assert result.curve == whole.curve
    assert (result.error, result.seconds_in_all) == (whole.error, None)


@pytest.mark.unwatched
@pytest.mark.usefixtures("opened_cifar")
def test_that_the_papers_setting_cannot_prune_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(), out=tmp_path, device="cpu")
    assert "note: this run cannot prune 3 of 3 groups" in capsys.readouterr().out
    record = json.loads((tmp_path / small().name / "record.json").read_text())
    assert "a gate is closed below -2.40" in record["forecast"]
