import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError
from tests.gating.networks import Net, Tied


def make() -> hc.GatedModel:
    return hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=["conv:out", "fc2:in"])


def names(gated: hc.GatedModel, group: dict) -> list[str]:
    """The parameters of an optimiser's group by name."""
    known = {id(p): name for name, p in gated.named_parameters()}
    return [known[id(p)] for p in group["params"]]


def test_gates_have_their_own_rate_and_no_decay() -> None:
    gated = make()
    weights, gates = hc.parameter_groups(gated, lr=0.1, gate_lr=0.2, weight_decay=0.3)
    assert (weights["name"], weights["lr"], weights["weight_decay"]) == ("weights", 0.1, 0.3)
    assert (gates["name"], gates["lr"], gates["weight_decay"]) == ("gates", 0.2, 0.0)
    assert names(gated, gates) == ["gates.log_alpha"]
    assert names(gated, weights) == [f"model.{n}" for n, _ in gated.model.named_parameters()]
    assert [group["lr"] for group in hc.parameter_groups(gated, 0.1, weight_decay=0.3)] == [0.1] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -0.1), ("lr", "0.1"), ("lr", None), ("lr", float("nan")), ("gate_lr", -1.0),
     ("weight_decay", -0.1), ("weight_decay", float("inf")), ("weight_decay", True)],
)  # fmt: skip
def test_what_is_no_rate_is_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}=.* must be a number, neither negative"):
        hc.parameter_groups(make(), **{"lr": 0.1, name: value})


def test_a_rate_may_be_a_tensor() -> None:
    rate = torch.tensor(0.1)
    assert hc.parameter_groups(make(), lr=rate)[0]["lr"] is rate


def test_without_settings_of_their_own_gates_join_the_weights() -> None:
    gated = make()
    (only,) = hc.parameter_groups(gated, lr=0.1)
    assert (only["name"], only["lr"], only["weight_decay"]) == ("weights and gates", 0.1, 0.0)
    assert names(gated, only) == [
        *[f"model.{name}" for name, _ in gated.model.named_parameters()],
        "gates.log_alpha",
    ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_every_optimiser_takes_them(kind: type[torch.optim.Optimizer]) -> None:
    gated = make()
    moved = {"gates.log_alpha", "model.fc1.weight", "model.fc2.bias"}
    before = {name: gated.get_parameter(name).detach().clone() for name in moved}
    optimizer = kind(hc.parameter_groups(gated, lr=0.1, gate_lr=0.01))
    gated(torch.randn(4, 1, 4, 4)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(gated.get_parameter(name), p) for name, p in before.items())


def test_gates_do_not_decay_without_a_gradient() -> None:
    """Also with an optimiser whose default is to decay."""
    gated = make()
    before = gated.gates.log_alpha.detach().clone()
    optimizer = torch.optim.AdamW(hc.parameter_groups(gated, lr=0.1, weight_decay=0.5))
    for p in gated.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(gated.gates.log_alpha, before)


def test_what_the_penalty_decays_the_optimiser_does_not() -> None:
    gated = make()
    penalty = hc.L0Penalty(gated, 0.1, weight_decay=0.01)
    weights, penalised, gates = hc.parameter_groups(gated, lr=0.1, weight_decay=0.3)
    assert penalised["name"] == "weights decayed by the penalty"
    assert (penalised["lr"], penalised["weight_decay"]) == (0.1, 0.0)
    assert names(gated, penalised) == ["model.conv.weight", "model.conv.bias", "model.fc2.weight"]
    assert weights["weight_decay"] == 0.3
    everything = names(gated, weights) + names(gated, penalised) + names(gated, gates)
    assert sorted(everything) == sorted(name for name, _ in gated.named_parameters())
    assert penalty.weight_decay == 0.01


@pytest.mark.parametrize("site", ["first:in", "second:in"])
def test_tied_weights_decay_once(site: str) -> None:
    gated = hc.attach_gates(Tied(), torch.zeros(2, 4), sites=[site])
    penalty = hc.L0Penalty(gated, 0.1, weight_decay=0.01)
    groups = hc.parameter_groups(gated, lr=0.1, weight_decay=0.3)
    assert [group["name"] for group in groups] == ["weights decayed by the penalty", "gates"]
    assert penalty.weight_decay == 0.01


def test_what_a_penalty_carried_decays_again_when_it_is_gone() -> None:
    gated = make()
    first = hc.L0Penalty(gated, 0.1, weight_decay=0.01)
    second = hc.L0Penalty(gated, 0.1, weight_decay=0.02)
    del first  # replaced, as in a notebook whose cell runs again
    carried = hc.parameter_groups(gated, lr=0.1, weight_decay=0.3)[1]
    assert carried["name"] == "weights decayed by the penalty"
    del second
    weights, gates = hc.parameter_groups(gated, lr=0.1, weight_decay=0.3)
    assert names(gated, weights) == [f"model.{n}" for n, _ in gated.model.named_parameters()]
    assert gates["weight_decay"] == 0.0


def test_a_model_without_gates_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"takes what attach_gates returned, not a Net"):
        hc.parameter_groups(Net(), lr=0.1)


def test_a_penalty_that_comes_too_late_is_refused() -> None:
    gated = make()
    hc.parameter_groups(gated, lr=0.1, weight_decay=0.3)
    with pytest.raises(ArgumentError, match=r"would decay twice; build the L0Penalty first"):
        hc.L0Penalty(gated, 0.1, weight_decay=0.01)
    assert gated.decayed_by_penalty == frozenset()
    hc.L0Penalty(gated, 0.1)


def test_without_decay_the_order_does_not_matter() -> None:
    gated = make()
    hc.parameter_groups(gated, lr=0.1)
    hc.L0Penalty(gated, 0.1, weight_decay=0.01)
    assert [g["weight_decay"] for g in hc.parameter_groups(gated, 0.1)] == [0.0]


def test_what_is_frozen_is_left_out() -> None:
    gated = make()
    gated.model.requires_grad_(False)
    (gates,) = hc.parameter_groups(gated, lr=0.1)
    assert names(gated, gates) == ["gates.log_alpha"]
    gated.model.requires_grad_(True)
    gated.freeze_gates()
    (weights,) = hc.parameter_groups(gated, lr=0.1)
    assert names(gated, weights) == [f"model.{n}" for n, _ in gated.model.named_parameters()]
    assert isinstance(weights["params"][0], nn.Parameter)
