"""What can be trained on MNIST, and what cannot."""

from typing import Any

import pytest
import torch

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from hardconcrete_paper.mnist.experiment import NETWORKS, QUIRKS, MnistExperiment, learner


def untrained(network: str, **settings: Any) -> tuple[hc.GatedModel, list[Any]]:
    one = learner(MnistExperiment(network, **settings), 0, 60_000, torch.device("cpu"))
    assert isinstance(one.model, hc.GatedModel)
    return one.model, list(one.objective.penalties)


def test_the_authors_bias_is_not_trained_and_lowers_the_price() -> None:
    lam = (10.0, 0.5, 0.1, 10.0)
    gated, (penalty,) = untrained("lenet5", lam=lam)
    theirs, (their_penalty,) = untrained("lenet5", lam=lam, quirks=("bias",))
    sizes = {group.name: group.size for group in gated.groups}
    assert (sizes["conv1:out"], sizes["conv2:out"]) == (26, 501)
    ratio = {name: their_penalty.lam[name] / penalty.lam[name] for name in sizes}
    assert ratio["conv1:out"] == pytest.approx(24 / 26)
    assert ratio["conv2:out"] == pytest.approx(499 / 501)
    assert ratio["fc1:in"] == ratio["fc2:in"] == 1
    frozen = {name for name, p in theirs.model.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1.bias", "conv2.bias"}


def test_quirks_reach_the_recipe() -> None:
    one = learner(MnistExperiment("mlp", quirks=tuple(QUIRKS)), 0, 100, torch.device("cpu"))
    assert one.recipe.clamp == pytest.approx((-4.60517, 4.60517))
    assert one.recipe.divided_average


def test_every_example_can_have_gates_of_its_own() -> None:
    one = learner(MnistExperiment("mlp", per_example=True), 0, 60_000, torch.device("cpu"))
    image, label = torch.ones(1, 1, 28, 28), torch.zeros(1, dtype=torch.long)
    noise = torch.rand(2, one.gates)
    losses = [one.objective(noise[k : k + 1], image, label) for k in (0, 1)]
    assert losses[0] != losses[1]
    both = one.objective(noise, image.expand(2, -1, -1, -1), label.expand(2))
    penalty = next(iter(one.objective.penalties))()
    assert (both - penalty).item() == pytest.approx((sum(losses) / 2 - penalty).item(), rel=1e-5)


@pytest.mark.parametrize("method", ["l0", "budget", "dense", "dropout"])
def test_all_weights_decay_once(method: str) -> None:
    own: dict[str, Any] = {"lam": (0.1,)} if method == "l0" else {"lam": ()}
    own |= {"macs": 0.5} if method == "budget" else {}
    with_decay = MnistExperiment("lenet5", method=method, weight_decay=5e-4, **own)
    one = learner(with_decay, 0, 60_000, torch.device("cpu"))
    in_optimizer = {
        id(parameter)
        for optimizer in one.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group["weight_decay"] == 5e-4
    }
    in_penalty = set()
    if isinstance(one.model, hc.GatedModel):
        assert next(iter(one.objective.penalties)).weight_decay == 5e-4
        decayed = one.model.decayed_by_penalty
        in_penalty = {id(p) for name, p in one.model.model.named_parameters() if name in decayed}
        assert decayed == {
            *("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"),
            *("fc1.weight", "fc2.weight"),
        }
    assert not in_optimizer & in_penalty
    network = getattr(one.model, "model", one.model)
    assert in_optimizer | in_penalty == {id(parameter) for parameter in network.parameters()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "l1"}, "'l1' is not known: l0, dense, dropout, budget"),
        ({"method": "dense"}, "a dense network has no lambdas"),
        ({"method": "budget", "lam": ()}, "a budget, and nothing else, takes macs"),
        ({"macs": 0.5}, "a budget, and nothing else, takes macs"),
        ({"quirks": ("luck",)}, "quirk 'luck' is not known: clamp, average, bias"),
        ({"per_example": True, "method": "dense", "lam": ()}, "--per-example is about gates"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        MnistExperiment("mlp", **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"network": "vgg"}, "'vgg' is not known: mlp, lenet5"),
        ({"network": "mlp", "lam": (1.0, 2.0)}, "one for each of fc1:in, fc2:in, fc3:in, not 2"),
        ({"network": "mlp", "seeds": ()}, "at least one seed"),
        ({"network": "mlp", "seeds": (1, 1)}, "each once"),
        ({"network": "mlp", "epochs": 0}, "--epochs 0"),
        ({"network": "mlp", "lam": (-0.1,)}, "--lam -0.1 must not be negative"),
        ({"network": "mlp", "lam": (float("nan"),)}, "--lam nan"),
        ({"network": "mlp", "seeds": (-1,)}, "--seeds -1"),
        ({"network": "mlp", "weight_decay": -0.1}, "--weight-decay -0.1 must not be negative"),
        ({"network": "mlp", "weight_decay": float("inf")}, "--weight-decay inf"),
    ],
)
def test_impossible_numbers_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        MnistExperiment(**arguments)


@pytest.mark.parametrize(
    ("name", "sizes"), [("mlp", (300, 100, 10)), ("lenet5", (26, 501, 500, 10))]
)
def test_the_gates_of_the_paper(name: str, sizes: tuple[int, ...]) -> None:
    network = NETWORKS[name]
    gated, (penalty,) = untrained(name)
    assert tuple(group.size for group in gated.groups) == sizes
    assert {group.name: group.units for group in gated.groups} == network.sizes
    assert set(penalty.lam.values()) == {0.1 / 60_000}
    for group in gated.groups:
        start = gated.gates.log_alpha[group.slice].sigmoid().mean().item()
        assert 1 - start == pytest.approx(network.droprate[group.name], abs=0.005)
