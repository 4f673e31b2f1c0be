"""What can be a row of table 2, and what trains it."""

import math

import pytest
import torch

import hardconcrete as hc
from hardconcrete.demo.data import Images
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.cifar.experiment import CifarExperiment, cifar_learner
from hardconcrete_paper.data.augmentation import CIFAR_STATISTICS, Preparation
from hardconcrete_paper.training.engine import Engine

CPU = torch.device("cpu")


def small(**settings: object) -> CifarExperiment:
    return CifarExperiment(**{"network": "wrn-10-1", "epochs": 2, **settings})


def test_the_gates_of_the_wide_network_are_those_of_the_paper() -> None:
    experiment = CifarExperiment(network="wrn-16-2")
    one = cifar_learner(experiment, 50_000, CPU)
    assert [group.units for group in one.model.groups] == [32, 32, 64, 64, 128, 128]
    assert one.model.gates.log_alpha.mean().item() == pytest.approx(0.847, abs=0.01)
    decays = {group["weight_decay"] for group in one.optimizers[0].param_groups}
    assert decays == {5e-4, 0.0}
    faithful = cifar_learner(CifarExperiment(network="wrn-16-2", paper_gates=True), 50_000, CPU)
    assert faithful.recipe.draws == 2
    assert faithful.model.groups[0].name == "stages.0.0.conv1:out"


def test_a_rate_of_their_own_is_adams() -> None:
    quick = cifar_learner(small(gate_lr=5e-3), 50_000, CPU)
    assert [type(optimizer).__name__ for optimizer in quick.optimizers] == ["SGD", "Adam"]


def test_a_budget_moves_its_gates_apart_from_the_schedule() -> None:
    one = cifar_learner(small(variant="budget"), 50_000, CPU)
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
    budget = cifar_learner(slower, 50_000, CPU).budget
    assert budget is not None
    assert budget.warmup == 0.5 * 2 * 390


def test_averaging_takes_the_place_of_later_falls_of_the_learning_rate() -> None:
    experiment = CifarExperiment(network="wrn-10-1", variant="dense", swa=0.6)
    assert "dense-swa0.6-seed" in experiment.name
    recipe = cifar_learner(experiment, 50_000, CPU).recipe
    rates = [recipe.rate(epoch) for epoch in (59, 60, 119, 120, 199)]
    assert rates == pytest.approx([0.1, 0.02, 0.02, 0.02, 0.02])


@pytest.mark.parametrize(("network", "decay"), [("wrn-10-1", 5e-4), ("resnet-8", 1e-4)])
def test_networks_decay_as_they_were_published_to(network: str, decay: float) -> None:
    dense = cifar_learner(small(network=network, variant="dense"), 50_000, CPU)
    assert dense.optimizers[0].param_groups[0]["weight_decay"] == decay
    (penalty,) = cifar_learner(small(network=network), 50_000, CPU).objective.penalties
    assert penalty.weight_decay == pytest.approx(decay / 0.7)


def test_with_noise_an_open_gate_stays_as_uncertain_as_it_began() -> None:
    pixels = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    images = Images(pixels, torch.arange(256) % 10, "noise")
    highest = {}
    for noise in (False, True):
        experiment = small(variant="budget", noise=noise, gate_lr=0.5)
        one = cifar_learner(experiment, 256, CPU)
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
        ({"variant": "dense", "paper_gates": True}, "--paper-gates is about gates"),
        ({"variant": "l0", "noise": True}, "--noise is about what a budget leaves"),
        ({"variant": "l0", "warmup": 0.3}, "for --variant budget"),
        ({"variant": "budget", "warmup": 0.0}, "--warmup 0.0 must be a part of the training"),
        ({"swa": 1.0}, "--swa 1.0 must be a part of the 200 epochs"),
        ({"swa": 0.999}, "with at least one before and one after it"),
        ({"swa": 0.5, "epochs": 1}, "--swa 0.5 must be a part of the 1 epochs"),
        ({"swa": math.nan}, "--swa nan must be a part of the 200 epochs"),
        ({"macs": 0.3}, "--macs 0.3 must be a part of the multiply-adds, for --variant budget"),
        ({"variant": "budget", "macs": 0.0}, "--macs 0.0 must be a part of the multiply-adds"),
        ({"params": 0.3}, "--params 0.3 must be a part of the parameters, for --variant budget"),
        ({"variant": "budget", "params": 1.5}, "--params 1.5 must be a part of the parameters"),
        ({"variant": "budget", "lam": 0.001}, "--lam 0.001 must .* is for --variant l0"),
        ({"variant": "dense", "gate_lr": 0.1}, "--gate-lr 0.1 must .* is for gates"),
        ({"variant": "dropout", "shrink": 3}, "--shrink 3 must .* is for gates"),
        ({"gate_lr": 0.0}, "--gate-lr 0.0 must be positive and finite"),
        ({"gate_lr": -1.0}, "--gate-lr -1.0 must be positive and finite"),
        ({"gate_lr": math.nan}, "--gate-lr nan must be positive and finite"),
        ({"network": "wrn-28"}, r"wrn-28 does not exist as l0: use wrn-28-10 \(depth and width"),
        ({"network": "resnet"}, "--network resnet does not exist"),
    ],
)
def test_impossible_rows_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        CifarExperiment(**settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "wrn-28-10-cifar10-l0-0.001-seed0"),
        ({"variant": "dense"}, "wrn-28-10-cifar10-dense-seed0"),
        ({"variant": "budget", "shrink": 3}, "wrn-28-10-cifar10-budget-0.5-shrink3-seed0"),
    ],
)
def test_a_record_names_what_a_variant_does_not_use(settings: dict, name: str) -> None:
    experiment = CifarExperiment(**settings)
    assert experiment.name == name
    told = experiment.settings()
    assert (told["lam"], told["macs"]) == (0.001, 0.5)
    again = CifarExperiment.of(told)
    assert (again.name, again.settings()) == (name, told)


def test_a_budget_of_parameters_alone_and_beside_multiply_adds() -> None:
    alone = small(variant="budget", params=0.3)
    assert alone.name == "wrn-10-1-cifar10-budget-params0.3-seed0"
    assert alone.settings()["macs"] is None
    assert CifarExperiment.of(alone.settings()) == alone
    both = small(variant="budget", macs=0.6, params=0.3)
    assert both.labels == ["0.6", "params 0.3"]
    budget = cifar_learner(both, 50_000, CPU).budget
    assert budget is not None
    targets = [each.limit / each.dense for each in budget.constraints]
    assert 0.27 - 1e-9 <= min(targets) < 0.3
    assert 0.54 - 1e-9 <= max(targets) < 0.6


@pytest.mark.parametrize("epochs", [1, 2, 200])
def test_the_first_epoch_has_the_highest_rate(epochs: int) -> None:
    recipe = cifar_learner(small(variant="dense", epochs=epochs), 50_000, CPU).recipe
    assert recipe.rate(0) == 0.1
    assert epochs < 200 or recipe.milestones == (60, 120, 160)


def test_a_budget_that_cannot_be_met_is_said_in_the_numbers_given() -> None:
    with pytest.raises(ArgumentError, match=r"--macs 0.05 is too small: training aims at 0.045.*"):
        cifar_learner(small(variant="budget", macs=0.05), 50_000, CPU)
