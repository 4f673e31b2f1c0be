"""Rows of table 2 at a small size, on a few made-up images."""

import json
import math
from pathlib import Path

import pytest
import torch

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete.paper import wide
from hardconcrete.paper.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete.paper.engine import Engine
from hardconcrete.paper.records import RunFolder
from hardconcrete.paper.wide import WideExperiment, run_wide, wide_learner

CPU = torch.device("cpu")


def small(**settings: object) -> WideExperiment:
    return WideExperiment(**{"network": "wrn-10-1", "epochs": 2, **settings})


@pytest.mark.parametrize(
    "experiment",
    [
        small(variant="dense"),
        small(variant="dropout"),
        small(dataset="cifar100"),
        small(faithful=True),
        small(variant="budget"),
        small(variant="budget", shrink=1, noise=True, epochs=4, gate_lr=4.0),
        WideExperiment(network="resnet-8", epochs=1),
        WideExperiment(network="preact-8", epochs=1, variant="dense"),
    ],
    ids=lambda experiment: experiment.name,
)
def test_every_kind_of_row_is_trained_and_tested_once(
    experiment: WideExperiment, opened_cifar: list[str], tmp_path: Path
) -> None:
    result = run_wide(experiment, out=tmp_path, device="cpu")
    assert opened_cifar == ["train", "test"]
    assert 0 < result.error <= 100
    assert result.images_per_second > 0
    assert result.macs[0] <= result.macs[1]
    assert [*result.curve] == [str(epoch) for epoch in range(1, experiment.epochs + 1)]
    assert [*result.latency] == ["cpu, float32, batch 1"]
    assert result.seconds_in_all > result.seconds
    if experiment.variant == "budget":
        assert result.macs[0] <= 0.5 * result.macs[1]
        assert len(result.units) == 3
        assert all(units % 8 == 0 for units in result.units)
    folder = RunFolder(tmp_path / experiment.name)
    state, _, _ = folder.load()
    assert ("seed0.model.gates.original" in state) == bool(experiment.shrink)  # units have gone
    record = folder.read()
    assert record["tested_on"] == "test set"
    assert len(record["test_opened"]) == 1
    assert run_wide(experiment, out=tmp_path, resume=True) == result
    assert opened_cifar == ["train", "test"]


@pytest.mark.usefixtures("opened_cifar")
@pytest.mark.parametrize("variant", ["l0", "dropout"])
def test_a_run_in_pieces_is_the_run_in_one(variant: str, tmp_path: Path) -> None:
    experiment = small(variant=variant)
    whole = run_wide(experiment, out=tmp_path / "whole", device="cpu")
    pieces = tmp_path / "pieces"
    assert run_wide(experiment, out=pieces, device="cpu", minutes=0.0) is None
    result = run_wide(experiment, out=pieces, device="cpu", resume=True, minutes=60.0)
    assert result.error == whole.error
    assert result.curve == whole.curve
    assert result.expected_macs == whole.expected_macs


@pytest.mark.usefixtures("opened_cifar")
def test_a_shrunk_network_goes_on_and_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, build = [], Engine.build
    monkeypatch.setattr(Engine, "build", lambda engine: (builds.append(engine), build(engine)))
    experiment = small(variant="budget", shrink=1, epochs=4, gate_lr=4.0)
    whole = run_wide(experiment, out=tmp_path / "whole", device="cpu")
    shrinks, pieces, result = len(builds) - 1, 0, None
    while result is None:
        out = tmp_path / "pieces"
        result = run_wide(experiment, out=out, device="cpu", resume=pieces > 0, minutes=0.0)
        pieces += 1
    assert pieces == 4
    assert shrinks > 0
    assert len(builds) == 1 + shrinks + pieces + shrinks
    assert result.curve == whole.curve
    assert (result.error, result.seconds_in_all) == (whole.error, None)


def test_the_gates_of_the_wide_network_are_those_of_the_paper() -> None:
    experiment = WideExperiment(network="wrn-16-2")
    one = wide_learner(experiment, 50_000, CPU)
    assert [group.units for group in one.model.groups] == [32, 32, 64, 64, 128, 128]
    assert one.model.gates.log_alpha.mean().item() == pytest.approx(0.847, abs=0.01)
    decays = {group["weight_decay"] for group in one.optimizers[0].param_groups}
    assert decays == {5e-4, 0.0}
    faithful = wide_learner(WideExperiment(network="wrn-16-2", faithful=True), 50_000, CPU)
    assert faithful.recipe.draws == 2
    assert faithful.model.groups[0].name == "stages.0.0.conv1:out"


@pytest.mark.usefixtures("opened_cifar")
def test_that_the_papers_setting_cannot_prune_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_wide(small(), out=tmp_path, device="cpu")
    assert "note: this run cannot prune 3 of 3 groups" in capsys.readouterr().out
    record = json.loads((tmp_path / small().name / "record.json").read_text())
    assert "a gate is shut below -2.40" in record["forecast"]
    quick = wide_learner(small(gate_lr=5e-3), 50_000, CPU)
    assert [type(optimizer).__name__ for optimizer in quick.optimizers] == ["SGD", "Adam"]


def test_a_budget_moves_its_gates_apart_from_the_schedule() -> None:
    one = wide_learner(small(variant="budget"), 50_000, CPU)
    kinds = [type(optimizer).__name__ for optimizer in one.optimizers]
    assert kinds == ["SGD", "Adam"]
    one.begin_epoch(1, 10)
    rates = [group["lr"].item() for each in one.optimizers for group in each.param_groups]
    assert rates[-1] == pytest.approx(5e-3)
    assert rates[0] == pytest.approx(0.1 * 0.2**2)
    assert isinstance(one.budget, hc.Budget)
    assert one.budget.warmup == pytest.approx(0.1 * 2 * 390, abs=1)
    slower = small(variant="budget", warmup=0.5)
    assert "budget-0.5-warmup0.5-seed" in slower.name
    budget = wide_learner(slower, 50_000, CPU).budget
    assert budget is not None
    assert budget.warmup == 0.5 * 2 * 390


@pytest.mark.parametrize(("network", "decay"), [("wrn-10-1", 5e-4), ("resnet-8", 1e-4)])
def test_networks_decay_as_they_were_published_to(network: str, decay: float) -> None:
    dense = wide_learner(small(network=network, variant="dense"), 50_000, CPU)
    assert dense.optimizers[0].param_groups[0]["weight_decay"] == decay
    (penalty,) = wide_learner(small(network=network), 50_000, CPU).objective.penalties
    assert penalty.weight_decay == pytest.approx(decay / 0.7)


@pytest.mark.usefixtures("opened_cifar")
def test_with_noise_an_open_gate_stays_as_uncertain_as_it_began() -> None:
    highest = {}
    for noise in (False, True):
        experiment = small(variant="budget", noise=noise, gate_lr=0.5)
        one = wide_learner(experiment, 256, CPU)
        images = wide.load_cifar(10, "train", None)
        engine = Engine([one], images, prepare=Preparation(CIFAR_STATISTICS[10]))
        assert list(engine) == [1, 2]
        highest[noise] = one.model.gates.log_alpha.max().item()
    assert highest[True] <= math.log(0.7 / 0.3) + 1e-6 < highest[False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"network": "vgg-16"}, "--network vgg-16 does not exist"),
        ({"network": "wrn-11-1"}, "depth 11 is not 6n"),
        ({"network": "resnet-20", "variant": "dropout"}, "does not exist as dropout"),
        ({"dataset": "mnist"}, "dataset 'mnist' is not known: cifar10, cifar100"),
        ({"variant": "l1"}, "variant 'l1' is not known"),
        ({"epochs": 0}, "--epochs 0"),
        ({"lam": -1.0}, "--lam -1.0"),
        ({"variant": "dense", "faithful": True}, "--faithful is about gates"),
        ({"variant": "l0", "noise": True}, "--noise is about what a budget leaves"),
        ({"variant": "l0", "warmup": 0.3}, "for --variant budget"),
        ({"variant": "budget", "warmup": 0.0}, "--warmup 0.0 must be a part of the training"),
    ],
)
def test_impossible_rows_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        WideExperiment(**settings)
