"""Shrinking in training: the same function, the same training, in units of the dense model."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hardconcrete as hc
from hardconcrete.errors import ArgumentError, CompactionError, SiteError
from hardconcrete.sparsifiers import RectifiedGates
from tests.compaction.networks import Maps, Sized, dense
from tests.exactness import apart, at_random, outputs, with_random_gates
from tests.units.random_networks import random_network
from tests.zoo import ZOO, gated_network

SOME = (
    "mlp", "lenet", "stored_decoy", "depthwise_separable", "wide_resnet", "densenet",
    "tied_language_model", "torch_encoder", "weight_norm", "reused_block",
)  # fmt: skip
ENTRIES = [entry for entry in ZOO if entry.name in SOME]


class TinyLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 6, 3)
        self.fc1, self.fc2 = nn.Linear(24, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        return self.fc2(self.fc1(self.conv2(x).relu().flatten(1)).relu())


NESTED = ("conv1:out", "conv2:out", "fc1:in", "fc2:in")


def nested() -> hc.GatedModel:
    """As in the paper, with gates on maps and on the inputs that each map has at a dense layer."""
    torch.manual_seed(1)
    return hc.attach_gates(TinyLeNet(), torch.randn(2, 1, 10, 10), sites=NESTED)


def found() -> hc.GatedModel:
    torch.manual_seed(1)
    return hc.attach_gates(Maps(), Maps.example())


def shut(gated: hc.GatedModel, units: dict[str, Any], location: float = -50.0) -> hc.GatedModel:
    """Units by group, shut for certain; all others are undecided."""
    with torch.no_grad():
        gated.gates.log_alpha.copy_(torch.linspace(-0.5, 1.5, len(gated.gates.log_alpha)))
        for group in gated.groups:
            gated.gates.log_alpha[group.slice][units.get(group.name, [])] = location
    return gated


NESTED_SHUT = {"conv1:out": [0, 3], "conv2:out": [2], "fc1:in": [0, 1, 2, 3, 9, 16], "fc2:in": [5]}
FOUND_SHUT = {"conv1": [1, 2], "conv2": [0], "fc1": [3, 6]}


def images(gated: hc.GatedModel, batch: int = 4) -> Tensor:
    shape = gated.example[0][0].shape[1:]
    return torch.randn(batch, *shape, dtype=gated.example[0][0].dtype)


def sizes(gated: hc.GatedModel) -> dict[str, int]:
    return {group.name: group.units for group in gated.groups}


@pytest.mark.unwatched
@pytest.mark.filterwarnings("ignore:.*_flat_weights")
@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_the_function_costs_and_compaction_stay(entry: Any, tmp_path: Path) -> None:
    small = assert_all_stays(at_random(gated_network(entry)), entry.inputs(3))
    hc.save(tmp_path / "small.safetensors", small)
    loaded = hc.load(tmp_path / "small.safetensors", entry.build()).eval()
    three = entry.inputs(3)
    assert apart(outputs(small.eval(), three), outputs(loaded, three)) == 0


def assert_all_stays(gated: hc.GatedModel, inputs: Any) -> nn.Module:
    """In two goes; then everything is as if nothing had been removed but by compaction."""
    fresh, compacted = copy.deepcopy(gated.eval()), hc.compact(gated)
    before = outputs(gated, inputs)
    costs = {cost: gated.delivered(cost) for cost in ("params", "macs", "weight_bytes")}
    locations = gated.gates.log_alpha.detach().clone()
    with torch.no_grad():
        gated.gates.log_alpha[::2] = 5.0
    hc.shrink(gated, None, below="readout", pays=0)
    kept = gated.gates.original
    with torch.no_grad():
        gated.gates.log_alpha.copy_(locations if kept is None else locations[kept])
    hc.shrink(gated, None, below="readout", pays=0)
    assert apart(before, outputs(gated, inputs)) < 1e-6
    assert {cost: gated.delivered(cost) for cost in costs} == costs
    again = hc.compact(gated)
    now, later = hc.count(gated.model, *gated.example), hc.count(again, *gated.example)
    if bool((gated.gates.readout() > 0).all()):
        assert (now.params, now.macs) == (later.params, later.macs)
    else:  # the last unit of a group that is shut stays, with what it reads
        assert 1 in sizes(gated).values()
    first, second = hc.CompactionPlan.of(compacted), hc.CompactionPlan.of(again)
    assert replace(first, scales=()) == replace(second, scales=())  # sigmoids round by their place
    assert apart(outputs(compacted.eval(), inputs), outputs(again.eval(), inputs)) < 1e-6
    fresh.load_state_dict(gated.state_dict())
    assert apart(outputs(gated, inputs), outputs(fresh, inputs)) == 0
    return again


@pytest.mark.slow
def test_random_networks_shrink_wherever_they_compact_as_modules() -> None:
    for seed in range(200, 300):
        network, inputs, _ = random_network(seed)
        try:
            gated = with_random_gates(network, lambda n, inputs=inputs: (inputs(n), {}), seed)
            form = hc.CompactionPlan.of(hc.compact(gated)).form
        except SiteError:
            continue
        if form == "module":
            assert_all_stays(gated, (inputs(3), {}))


@pytest.mark.parametrize(
    ("make", "units", "left"),
    [
        (nested, NESTED_SHUT, {"conv1:out": 3, "conv2:out": 4, "fc1:in": 15, "fc2:in": 7}),
        (found, FOUND_SHUT, {"conv1": 4, "conv2": 4, "fc1": 5}),
    ],
)
def test_the_loss_in_training_is_the_same(
    make: Callable[[], hc.GatedModel], units: dict[str, Any], left: dict[str, int]
) -> None:
    """Nested: map 0 of conv2 goes with its four inputs, map 2 takes its own four along."""
    gated = shut(make(), units).train()
    whole = copy.deepcopy(gated)
    x, noise = images(gated), torch.rand(len(gated.gates.log_alpha))
    report = hc.shrink(gated, None, pays=0)
    assert report
    assert sizes(gated) == left
    assert {name: after for name, (_, after) in report.units.items()} == left
    assert report.macs[1] == hc.count(hc.remove_gates(copy.deepcopy(gated)), *gated.example).macs
    small, large = under(gated, x, noise), under(whole, x, noise)
    torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gated.eval()(x), whole.eval()(x), rtol=1e-6, atol=1e-6)


def under(gated: hc.GatedModel, x: Tensor, noise: Tensor) -> Tensor:
    """Outputs for given noise, one number for every gate of the dense model."""
    gates = gated.gates
    own = noise if gates.original is None else noise[gates.original]
    with gates.holding(gates.distribution().icdf(own), None):
        result: Tensor = gated(x)
    return result


def train(gated: hc.GatedModel, optimizer: Optimizer, steps: int, seed: int) -> Tensor:
    """The last loss of the task, which keeps its graph as in a user's loop."""
    penalty = hc.L0Penalty(gated, lam=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        shape = (6, *gated.example[0][0].shape[1:])
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (6,), generator=generator)
        total = sum(group.dense_units for group in gated.groups)
        noise = torch.rand(total, generator=generator).clamp(0.01, 0.99)
        loss = F.cross_entropy(under(gated, x, noise), y)
        optimizer.zero_grad()
        (loss + penalty()).backward()
        optimizer.step()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, 0.05, momentum=0.9, nesterov=True),
    "foreach sgd": lambda p: SGD(p, 0.05, momentum=0.9, foreach=True),
    "fused sgd": lambda p: SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: Adam(p, 0.01, amsgrad=True, foreach=False),
    "foreach adam": lambda p: Adam(p, 0.01, foreach=True),
    "fused adam": lambda p: Adam(p, 0.01, fused=True),
    "adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1),
    "foreach adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1, foreach=True),
    "fused adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1, fused=True),
}


@pytest.mark.unwatched
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=[*OPTIMIZERS])
@pytest.mark.parametrize(("network", "units"), [(nested, NESTED_SHUT), (found, FOUND_SHUT)])
def test_training_goes_on_as_without(
    make: Callable[[Any], Optimizer], network: Callable[[], hc.GatedModel], units: dict[str, Any]
) -> None:
    """A twin is shrunk at the end only: weights, gates, momenta and averages are those."""
    results = []
    for early in (True, False):
        gated = shut(network(), units).double().train()
        optimizer = make(hc.parameter_groups(gated, 0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        average = AveragedModel(gated, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        loss = train(gated, optimizer, 3, seed=1)
        average.update_parameters(gated)
        if early:
            assert hc.shrink(gated, optimizer, averages=average, pays=0)
        scheduler.step()
        parameters = list(gated.parameters())
        loss = train(gated, optimizer, 3, seed=2) + 0 * loss
        average.update_parameters(gated)
        if not early:
            assert hc.shrink(gated, optimizer, averages=[average], pays=0)
        state = [optimizer.state[p] for p in parameters]
        assert all(v.shape in (p.shape, ()) for p, s in zip(parameters, state, strict=True)
                   for v in s.values() if v is not None)  # fmt: skip
        results.append([loss, gated.state_dict(), average.state_dict(), state])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_a_gradient_is_cut_along() -> None:
    gated = shut(found(), FOUND_SHUT)
    x = images(gated)
    gated(x).sum().backward()
    whole = {name: p.grad for name, p in gated.model.named_parameters()}
    hc.shrink(gated, None, pays=0)
    kept = [0, 3, 4, 5]
    assert torch.equal(gated.model.conv1.weight.grad, whole["conv1.weight"][kept])  # type: ignore[index,union-attr]


def test_channels_last_stays() -> None:
    gated = shut(nested(), {"conv1:out": [0]}).to(memory_format=torch.channels_last)
    optimizer = SGD(gated.parameters(), 0.1, momentum=0.9)
    gated(images(gated)).sum().backward()
    optimizer.step()
    hc.shrink(gated, optimizer, pays=0)
    weight: Any = gated.model.conv2._parameters["weight"]  # type: ignore[union-attr]
    for tensor in (weight, weight.grad, optimizer.state[weight]["momentum_buffer"]):
        assert tensor.shape[1] == 4
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_pixels_are_selected_and_selected_again() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 2))
    gated = hc.attach_gates(model, torch.randn(2, 4, 4), sites=["1:in", "3:in"])
    shut(gated, {"1:in": [0, 5]}).eval()
    x = torch.randn(3, 4, 4)
    for units, left in (({}, 14), ({"1:in": [1, 13]}, 12)):
        shut(gated, units) if units else None
        before = gated(x)
        assert hc.shrink(gated, None, pays=0)
        torch.testing.assert_close(gated(x), before)
        assert model[1].weight.shape == (6, left)
    assert model[1].kept_inputs.tolist() == [1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    small = hc.compact(gated)
    torch.testing.assert_close(small(x), gated(x))
    assert hc.CompactionPlan.of(small).selections["1"] == tuple(small[1].kept_inputs.tolist())


def test_a_gate_per_example_goes_on() -> None:
    gated = hc.attach_gates(TinyLeNet(), torch.randn(2, 1, 10, 10), sites=NESTED, sample="example")
    shut(gated, NESTED_SHUT)
    assert hc.shrink(gated, None, pays=0)
    gated(images(gated)).sum().backward()
    assert gated.gates.log_alpha.grad is not None


def test_a_layer_stops_selecting_when_nothing_is_left_to_select() -> None:
    gated = shut(nested(), {"fc1:in": [8]}).eval()
    assert hc.shrink(gated, None, pays=0)
    fc1: Any = gated.model.fc1
    assert "kept_inputs" in dict(fc1.named_buffers())
    shut(gated, {"conv2:out": [2]})
    x = images(gated)
    before = gated(x)
    assert hc.shrink(gated, None, pays=0)
    assert type(hc.remove_gates(copy.deepcopy(gated)).fc1) is nn.Linear
    torch.testing.assert_close(gated(x), before)


def test_single_weights_go_with_their_units() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    gated = hc.attach_gates(model, torch.randn(2, 4), sites=["0:each", "2:in"])
    shut(gated, {"0:each": [0, 7], "2:in": [1, 4]}).eval()
    x = torch.randn(3, 4)
    before = gated(x)
    assert hc.shrink(gated, None, pays=0)
    assert sizes(gated) == {"0:each": 12, "2:in": 3}
    torch.testing.assert_close(gated(x), before)


def test_a_shut_gate_before_a_norm_stays() -> None:
    """Its zeros become something behind the norm: nothing can go, nothing does."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    gated = hc.attach_gates(model, torch.randn(3, 4), sites=["0:out", "2:in"])
    shut(gated, {"0:out": [1, 2], "2:in": [4]})
    assert hc.shrink(gated, None, pays=0)
    assert sizes(gated) == {"0:out": 4, "2:in": 4}
    report = hc.shrink(gated, None, pays=0)
    assert not report
    assert sizes(gated) == {"0:out": 4, "2:in": 4}


def test_a_group_keeps_its_likeliest_unit() -> None:
    gated = found()
    with torch.no_grad():
        gated.gates.log_alpha[gated.groups[2].slice] = -20 + torch.arange(7.0)
    assert hc.shrink(gated, None, pays=0)
    assert sizes(gated)["fc1"] == 1
    assert gated.open_probability()["fc1"] == hc.HardConcrete(torch.tensor(-14.0)).open_probability


def test_a_collapsing_network_is_left_alone() -> None:
    """Its only hidden unit that is made is one that nothing reads."""
    sites = ["0:in", "0:out", "2:in"]
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))
    gated = hc.attach_gates(model, torch.randn(2, 6), sites=sites)
    shut(gated, {"0:in": [0, 1]})
    assert hc.shrink(gated, None, pays=0)
    shut(gated, {"0:in": [1], "0:out": [0, 1], "2:in": [2]})
    report = hc.shrink(gated, None, pays=0)
    assert not report
    assert "the network is collapsing" in str(report)
    assert sizes(gated) == {"0:in": 4, "0:out": 3, "2:in": 3}


def test_a_gate_must_stay_shut_for_some_checks() -> None:
    gated = shut(found(), FOUND_SHUT)
    assert not hc.shrink(gated, None, checks=3, pays=0)
    resumed = copy.deepcopy(gated)
    resumed.load_state_dict(gated.state_dict())
    with torch.no_grad():
        gated.gates.log_alpha[1] = 0.0
    assert not hc.shrink(gated, None, checks=3, pays=0)
    with torch.no_grad():
        gated.gates.log_alpha[1] = -50.0
    assert hc.shrink(gated, None, checks=3, pays=0)
    assert sizes(gated) == {"conv1": 5, "conv2": 4, "fc1": 5}
    hc.shrink(resumed, None, checks=3, pays=0)
    assert hc.shrink(resumed, None, checks=3, pays=0)
    assert sizes(resumed) == {"conv1": 4, "conv2": 4, "fc1": 5}


def test_nothing_is_cut_before_it_pays() -> None:
    gated = shut(found(), {"fc1": [0]})
    before = copy.deepcopy(gated.model.state_dict())
    report = hc.shrink(gated, None, pays=0.2)
    assert not report
    assert 0 < report.saved < 0.2
    assert str(report) == (
        f"nothing removed: 1 units have stayed closed, {report.saved:.1%} of the MACs, "
        "and 20% would pay"
    )
    torch.testing.assert_close(gated.model.state_dict(), before, rtol=0, atol=0)
    shut(gated, {"fc1": [0], "conv1": [0, 1, 2]})
    assert "fc1: 7 to 6" in str(hc.shrink(gated, None, pays=0.2))
    assert "nothing to remove" in str(hc.shrink(gated, None))


@pytest.mark.parametrize(("dead", "left"), [(3, 16), (9, 8), (14, 8), (16, 8)])
def test_widths_are_rounded_up(dead: int, left: int) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    gated = shut(hc.attach_gates(model, torch.randn(2, 4)), {"0": slice(0, dead)}, -20.0)
    with torch.no_grad():
        gated.gates.log_alpha[0] += 1.0  # the likeliest of the dead
    hc.shrink(gated, None, pays=0, round_to=8)
    assert model[0].out_features == left
    if dead == 9:
        assert gated.gates.original.tolist() == [0, *range(9, 16)]  # type: ignore[union-attr]


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """From a file of tensors, into a dense model with gates; the next steps are the same."""
    gated = shut(nested(), NESTED_SHUT).double()
    optimizer = Adam(gated.parameters(), 0.01)
    train(gated, optimizer, 2, seed=1)
    hc.shrink(gated, optimizer, pays=0)
    train(gated, optimizer, 2, seed=2)
    save_file(gated.state_dict(), tmp_path / "gated.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again = nested().double()
    resumed = Adam(again.parameters(), 0.01)
    again.load_state_dict(load_file(tmp_path / "gated.safetensors"))
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    first, second = train(gated, optimizer, 3, seed=3), train(again, resumed, 3, seed=3)
    assert torch.equal(first, second)
    torch.testing.assert_close(again.state_dict(), gated.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        again.gates.log_alpha[0] = -3.0
    assert not hc.shrink(again, resumed, pays=0)
    assert hc.shrink(again, resumed, below="readout", pays=0)  # and it goes on


def test_an_average_is_resumed() -> None:
    gated = shut(found(), FOUND_SHUT)
    average = AveragedModel(gated)
    hc.shrink(gated, None, averages=average, pays=0)
    fresh = AveragedModel(found())
    fresh.load_state_dict(average.state_dict())
    assert sizes(fresh.module) == sizes(gated)


def test_states_that_do_not_fit_are_refused() -> None:
    gated = shut(found(), FOUND_SHUT)
    dense = copy.deepcopy(gated.state_dict())
    hc.shrink(gated, None, pays=0)
    small = gated.state_dict()
    with pytest.raises(ArgumentError, match="load it into a new dense model"):
        gated.load_state_dict(dense)
    more = shut(found(), {"conv1": [0, 1, 2], "fc1": [3, 6]})
    hc.shrink(more, None, pays=0)
    with pytest.raises(CompactionError, match="cannot come back"):
        more.load_state_dict(small)
    other = nested()
    with pytest.raises(ArgumentError, match="of another model"):
        other.load_state_dict({**small, "gates.original": torch.tensor([3, 1])})
    with pytest.raises(CompactionError, match="cannot be kept here"):
        other.load_state_dict({**small, "gates.original": torch.arange(3)})
    assert other.gates.original is None


def test_penalty_and_costs_are_those_of_the_dense_model() -> None:
    gated = shut(nested(), NESTED_SHUT)
    whole = copy.deepcopy(gated)
    lam = dict(zip(NESTED, (0.1, 0.2, 0.3, 0.4), strict=True))
    penalty, reference = hc.L0Penalty(gated, lam), hc.L0Penalty(whole, lam)
    hc.shrink(gated, None, pays=0)
    torch.testing.assert_close(penalty(), _without_the_dead(reference, gated))
    penalty().backward()
    for cost in ("params", "macs", "weight_bytes"):
        torch.testing.assert_close(gated.expected(cost), whole.expected(cost), rtol=1e-6, atol=0)
        assert gated.delivered(cost) == whole.delivered(cost)
    assert torch.equal(gated.ledger.dense, whole.ledger.dense)
    gated.summary()


def _without_the_dead(reference: hc.L0Penalty, gated: hc.GatedModel) -> Tensor:
    """Gates that are open, but of no use since the unit died of another gate, cost no more."""
    whole = reference.gated.gates.log_alpha
    gone = torch.ones_like(whole, dtype=torch.bool)
    gone[gated.gates.original] = False
    whole.data[gone] = -50.0
    return reference()


def test_a_prior_for_every_gate_must_be_built_anew() -> None:
    gated = shut(found(), FOUND_SHUT)
    prior = hc.HardConcrete(torch.zeros(len(gated.gates.log_alpha)))
    penalty = hc.L0Penalty(gated, 0.1, prior=prior, examples=100)
    hc.shrink(gated, None, pays=0)
    with pytest.raises(ArgumentError, match="build a new L0Penalty"):
        penalty()


@pytest.mark.filterwarnings("ignore:the training ended above its budget")
@pytest.mark.parametrize(
    "limits", [{"macs": 0.4, "params": 0.5}, {"units": 0.6}, {"units": {"conv2": 4, "fc1": 0.5}}]
)
def test_a_budget_goes_on_in_dense_units(limits: dict[str, Any]) -> None:
    gated = shut(found(), FOUND_SHUT)
    whole = copy.deepcopy(gated)
    budget, reference = (
        hc.Budget(gated, steps=9, **limits, by="gates"),
        hc.Budget(whole, steps=9, **limits, by="gates"),
    )
    hc.shrink(gated, None, pays=0)
    for each in (budget, reference):
        each.step()
        each().backward()
    torch.testing.assert_close(budget(), reference())
    assert budget.delivered() == reference.delivered()
    kept = gated.gates.original
    theirs: Any = whole.gates.log_alpha.grad
    torch.testing.assert_close(gated.gates.log_alpha.grad, theirs[kept])
    later = hc.Budget(gated, steps=9, **limits, by="gates")
    assert later.target() == budget.target()
    assert [c.dense for c in later.constraints] == [c.dense for c in reference.constraints]
    small, large = hc.compact(gated, budget=budget), hc.compact(whole, budget=reference)
    plan, other = (hc.CompactionPlan.of(each).groups for each in (small, large))
    for group in whole.groups:  # what was removed cannot come back; nothing else differs
        left = {unit for unit in range(group.units) if group.start + unit in kept.tolist()}
        assert set(plan[group.name].kept) == left & set(other[group.name].kept)


def test_a_model_in_graph_form_is_refused_and_left_alone() -> None:
    gated = hc.attach_gates(Sized(), torch.randn(2, 1, 4, 4))
    shut(gated, {"conv": [0, 1, 2]})
    optimizer = SGD(gated.parameters(), 0.1, momentum=0.9)
    before, kinds = copy.deepcopy(gated.state_dict()), [type(m) for m in gated.modules()]
    with pytest.raises(CompactionError, match="Sized cannot shrink in place, and did not change"):
        hc.shrink(gated, optimizer, pays=0)
    torch.testing.assert_close(gated.state_dict(), before, rtol=0, atol=0)
    assert [type(m) for m in gated.modules()] == kinds
    assert gated.gates.checks is None
    gated(torch.randn(2, 1, 4, 4)).sum().backward()


def test_optimisers_with_other_state_are_refused() -> None:
    gated = shut(found(), FOUND_SHUT)
    optimizer = torch.optim.LBFGS(gated.parameters(), max_iter=2)
    x = images(gated)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = gated(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    before = copy.deepcopy(gated.state_dict())
    with pytest.raises(CompactionError, match="LBFGS keeps a tensor of shape"):
        hc.shrink(gated, optimizer, pays=0)
    torch.testing.assert_close(gated.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"below": 1.5}, "below=1.5 must lie between"),
        ({"below": "median"}, "below='median' must lie between"),
        ({"checks": 0}, "checks=0"),
        ({"round_to": 0}, "round_to=0"),
        ({"pays": 1.0}, "pays=1.0"),
        ({"optimizer": SGD([nn.Parameter(torch.zeros(2))], 0.1)}, "trains no parameter"),
        ({"optimizer": ["sgd"]}, "takes a torch.optim.Optimizer"),
        ({"optimizer": 3}, "takes a torch.optim.Optimizer"),
        ({"averages": 3}, "averages takes copies"),
        ({"averages": nn.Linear(2, 2)}, "averages takes copies"),
        ({"averages": nested()}, "averages takes copies"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.shrink(found(), **{"optimizer": None, **arguments})


class Learnt(nn.Module):
    def __init__(self, entries: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(entries))

    def forward(self, log_alpha: Tensor) -> hc.Rectified:
        return hc.HardConcrete(log_alpha, temperature=0.3 + 0.5 * self.raw.sigmoid())


def test_what_gates_learn_together_goes_on_and_what_each_learns_is_refused() -> None:
    for entries, works in ((1, True), (18, False)):
        gated = hc.attach_gates(Maps(), Maps.example(), method=RectifiedGates(Learnt(entries)))
        shut(gated, FOUND_SHUT)
        if works:
            assert hc.shrink(gated, None, pays=0)
            assert hc.CompactionPlan.of(hc.compact(gated)).groups["fc1"].units == 7
        else:
            with pytest.raises(CompactionError, match="cannot shrink in place"):
                hc.shrink(gated, None, pays=0)


def test_a_model_with_a_latency_table_is_refused() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.zeros(1, 4))
    gated.cost_tables.latency = object()
    with pytest.raises(ArgumentError, match="call measure_latency afterwards"):
        hc.shrink(gated, None)
    other = hc.attach_gates(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.zeros(1, 4))
    other.gates.log_alpha.data[:4] = -20.0
    assert hc.shrink(other, None, pays=0)
    with pytest.raises(ArgumentError, match="call measure_latency afterwards"):
        gated.load_state_dict(other.state_dict())


def test_it_is_for_gated_models_between_steps() -> None:
    with pytest.raises(ArgumentError, match="takes what attach_gates returned, not a Linear"):
        hc.shrink(nn.Linear(2, 2), None)  # type: ignore[arg-type]
    gated = found()
    with gated.draw(), pytest.raises(ArgumentError, match="between two steps"):
        hc.shrink(gated, None)


def test_copies_of_a_shrunk_model_compact_and_move() -> None:
    gated = shut(found(), FOUND_SHUT).eval()
    hc.shrink(gated, None, pays=0)
    copied = copy.deepcopy(gated).double().float()
    x = images(gated)
    torch.testing.assert_close(hc.compact(copied)(x), gated(x))
    assert not any(tensor.is_meta for tensor in (*gated.parameters(), *gated.buffers()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    gated = shut(nested(), NESTED_SHUT).cuda()
    optimizer = Adam(gated.parameters(), 0.01, fused=True, capturable=True)
    x = images(gated).cuda()
    gated(x).sum().backward()
    optimizer.step()
    assert hc.shrink(gated, optimizer, pays=0)
    budget = hc.Budget(gated, macs=0.5, by="gates")
    (gated(x).sum() + budget()).backward()
    optimizer.step()
    budget.step()
    small = hc.compact(gated.eval())
    torch.testing.assert_close(small(x), gated(x), rtol=1e-4, atol=1e-4)


def selecting() -> hc.GatedModel:
    """A layer that reads some of its inputs only, when it has shrunk."""
    layers = nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)
    gated = hc.attach_gates(nn.Sequential(*layers), torch.randn(2, 8, 8), sites=["1:in", "3:in"])
    gated.gates.log_alpha.data.fill_(3.0)[:20] = -20.0
    return gated


def test_what_selects_its_inputs_can_be_pickled() -> None:
    gated = selecting()
    hc.shrink(gated, None, pays=0.0)
    there = pickle.loads(pickle.dumps(gated))
    torch.manual_seed(0)
    here = gated(torch.ones(3, 8, 8))
    torch.manual_seed(0)
    assert torch.equal(there(torch.ones(3, 8, 8)), here)
    assert type(hc.remove_gates(there)[1]) is type(hc.remove_gates(gated)[1])


def test_averages_that_would_average_indices_are_refused() -> None:
    gated = selecting()
    average = AveragedModel(gated, use_buffers=True)
    with pytest.raises(ArgumentError, match="give it use_buffers=False"):
        hc.shrink(gated, None, averages=average, pays=0.0)
    assert gated.groups[0].units == 64
    assert hc.shrink(gated, None, averages=AveragedModel(gated), pays=0.0)


def test_a_state_can_be_written_into() -> None:
    """As averages of state_dicts do, integers too."""
    gated = selecting()
    hc.shrink(gated, None, pays=0.0)
    before = gated.gates.original.clone()
    for value in gated.state_dict().values():
        if not value.is_floating_point():
            value.zero_()
    assert torch.equal(gated.gates.original, before)


def test_in_inference_mode_and_in_double_precision() -> None:
    gated = selecting()
    optimizer = torch.optim.Adam(gated.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            assert hc.shrink(gated, optimizer, pays=0.0)
    finally:
        torch.set_default_dtype(torch.float32)
    gated(torch.randn(2, 8, 8)).sum().backward()
    optimizer.step()


def test_what_a_model_keeps_of_its_last_call() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.features = self.first(x).relu()
            return self.last(self.features)

    gated = hc.attach_gates(Keeps(), torch.randn(2, 4))
    gated.gates.log_alpha.data[:3] = -30.0
    gated(torch.randn(5, 4)).sum().backward()
    assert hc.shrink(gated, None, pays=0.0)
    gated(torch.randn(5, 4)).sum().backward()
    assert hc.compact(gated).first.out_features == 5


def test_state_of_an_optimiser_inside_lists() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.1)
    for parameter in gated.parameters():
        optimizer.state[parameter]["history"] = [parameter.detach().clone() for _ in range(2)]
    gated.gates.log_alpha.data[:3] = -30.0
    assert hc.shrink(gated, optimizer, pays=0.0)
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(past, parameter) for past in state["history"])


@pytest.mark.parametrize(
    "setting", [{"round_to": 8.0}, {"below": None}, {"pays": None}, {"checks": "2"}]
)
def test_settings_of_other_types_are_refused_in_words(setting: Any) -> None:
    with pytest.raises(ArgumentError, match=next(iter(setting))):
        hc.shrink(selecting(), None, **setting)
