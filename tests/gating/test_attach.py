"""Putting gates on and taking them off, and every refusal before anything has changed."""

import copy
import math
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import ArgumentError, SiteError
from hardconcrete.sparsifiers import RectifiedGates
from tests.gating.networks import Net, Scale, Temperature
from tests.gating.oracles import anatomy, by_hand, next_draw, unchanged
from tests.graph.test_model_state import Counter

MLP_SITES = ("fc1:in", "fc2:in", "fc3:in")
IMAGES = torch.zeros(2, 1, 28, 28)


def attach_net(**settings: object) -> hc.GatedModel:
    return hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=Net.sites, **settings)


# Initial locations


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_locations_start_at_the_drop_rate(p: float) -> None:
    """1184 draws of N(log((1-p)/p), 0.01): within 5 standard errors, one seed in 10^6 fails."""
    gates = hc.attach_gates(MLP(), IMAGES, sites=MLP_SITES, droprate=p).gates
    assert gates.log_alpha.shape == (784 + 300 + 100,)
    assert gates.log_alpha.dtype == torch.float32
    assert isinstance(gates.log_alpha, nn.Parameter)
    assert gates.log_alpha.mean().item() == pytest.approx(
        math.log((1 - p) / p), abs=5 * 0.01 / math.sqrt(1184)
    )
    assert gates.log_alpha.std().item() == pytest.approx(0.01, rel=5 / math.sqrt(2 * 1184))


def test_drop_rates_by_group_in_the_order_of_the_sites() -> None:
    droprate = {"fc3:in": 0.9, "fc1:in": 0.2, "fc2:in": 0.5}
    gated = hc.attach_gates(MLP(), IMAGES, sites=MLP_SITES, droprate=droprate)
    parts = gated.gates.log_alpha.split([784, 300, 100])
    for name, part in zip(MLP_SITES, parts, strict=True):
        odds = (1 - droprate[name]) / droprate[name]
        assert part.mean().item() == pytest.approx(math.log(odds), abs=0.006)
        assert torch.equal(gated.by_group(gated.gates.log_alpha)[name], part)


def test_drop_rates_by_the_names_of_sites() -> None:
    sites = [hc.Site("fc2.weight", 1), hc.Site(("conv.weight", "conv.bias"), 0)]
    droprate = {"conv.weight:0": 0.1, "fc2.weight:1": 0.6}
    gated = hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=sites, droprate=droprate)
    assert [group.name for group in gated.groups] == ["fc2.weight:1", "conv.weight:0"]
    means = [part.mean().item() for part in gated.gates.log_alpha.split([8, 3])]
    assert means == pytest.approx([math.log(0.4 / 0.6), math.log(9)], abs=0.03)


def test_the_seed_decides() -> None:
    def locations(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attach_net().gates.log_alpha

    assert torch.equal(locations(3), locations(3))
    assert not torch.equal(locations(3), locations(4))


def test_gates_are_float32_under_another_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        gated = attach_net()
    finally:
        torch.set_default_dtype(torch.float32)
    assert gated.gates.log_alpha.dtype == torch.float32


# On and off


@pytest.mark.parametrize("training", [True, False])
def test_gates_come_off_without_a_trace(training: bool) -> None:
    model = Net().train(training)
    model.bn.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = anatomy(model)
    gated = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites)
    assert gated.training == training
    assert [m.training for m in model.modules()] == [row[3] for row in before[:5]]
    assert gated.model is model
    assert hc.remove_gates(gated) is model
    assert anatomy(model) == before
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert type(model.fc1) is nn.Linear
    assert model.train()(torch.zeros(2, 1, 4, 4)).shape == (2, 4)
    assert hc.remove_gates(gated) is model  # nothing is left to do
    again = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=["fc1:each"])
    assert again.gates.log_alpha.shape == (96,)


def test_gates_that_came_later_stay() -> None:
    model = Net()
    first = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=["fc1:in"])
    hc.remove_gates(first)
    second = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=["fc1:each"])
    before = anatomy(model)
    with pytest.raises(ArgumentError, match="was called on this model again"):
        hc.remove_gates(first)
    assert anatomy(model) == before
    assert hc.remove_gates(second) is model


def test_gates_come_off_after_a_step() -> None:
    gated = attach_net()
    parameters = list(gated.model.parameters())
    optimizer = torch.optim.SGD(hc.parameter_groups(gated, lr=0.1))
    gated(torch.randn(4, 1, 4, 4)).sum().backward()
    optimizer.step()
    model = hc.remove_gates(gated)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert not any("_hardconcrete" in module.__dict__ for module in model.modules())


def test_something_else_has_no_gates_to_remove() -> None:
    with pytest.raises(hc.HardConcreteError):
        hc.remove_gates(nn.Linear(2, 2))


def test_example_inputs_and_keywords() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor, *, scale: float) -> Tensor:
            return scale * self.left(x) + self.right(y)

    sites, x, y = ["left:in", "right:in"], torch.zeros(2, 3), torch.zeros(2, 4)
    for inputs in ((x, y), [x, y]):
        gated = hc.attach_gates(Sum(), inputs, {"scale": 2.0}, sites=sites)
        assert gated(x, y, scale=1.0).shape == (2, 2)
    gated = hc.attach_gates(Sum(), x, {"y": y, "scale": 2.0}, sites=sites)
    assert len(gated.groups) == 2


def test_the_first_call_leaves_no_mark() -> None:
    """It runs in evaluation, without gradients, and with the random state put back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    statistics = model[1].running_mean.clone()
    torch.manual_seed(3)
    gated = hc.attach_gates(model, torch.ones(2, 4), sites=["0:in"])
    used = torch.get_rng_state()
    torch.manual_seed(3)
    torch.randn(4)
    assert torch.equal(torch.get_rng_state(), used)
    assert torch.equal(model[1].running_mean, statistics)
    assert model[1].num_batches_tracked == 0
    assert gated.training
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in gated.parameters())


# Other gates


def test_another_temperature_and_stretch() -> None:
    gated = attach_net(method=RectifiedGates(lambda a: hc.HardConcrete(a, 0.3, low=-0.2, high=1.5)))
    expected = hc.HardConcrete(gated.gates.log_alpha, 0.3, low=-0.2, high=1.5)
    found = torch.cat([*gated.open_probability().values()])
    assert torch.equal(found, expected.open_probability)
    assert torch.equal(gated.gates.readout(), expected.readout("paper"))
    torch.manual_seed(2)
    z = gated.gates.draw()
    torch.manual_seed(2)
    assert torch.equal(z, expected.rsample())


def test_another_distribution() -> None:
    gated = attach_net(
        method=RectifiedGates(lambda a: hc.Rectified(Normal(a, 0.2))), readout="mean", droprate=0.4
    )
    expected = hc.Rectified(Normal(gated.gates.log_alpha, 0.2))
    torch.testing.assert_close(gated.gates.readout(), expected.mean)
    gated(torch.randn(4, 1, 4, 4)).sum().backward()
    assert gated.gates.log_alpha.grad.any()
    assert gated.eval()(torch.zeros(2, 1, 4, 4)).isfinite().all()


def test_a_gate_can_learn() -> None:
    """A module is registered: trained, saved, and not decayed."""
    gated = attach_net(method=RectifiedGates(Temperature()))
    assert "gates.gate.raw" in gated.state_dict()
    groups = {group["name"]: group for group in hc.parameter_groups(gated, 0.1, weight_decay=0.1)}
    raw = gated.gates.gate.raw
    assert [id(p) for p in groups["gates"]["params"]] == [id(gated.gates.log_alpha), id(raw)]
    assert groups["gates"]["weight_decay"] == 0
    torch.manual_seed(0)
    gated(torch.randn(4, 1, 4, 4)).square().sum().backward()
    assert raw.grad.abs() > 0
    torch.optim.SGD(list(groups.values())).step()
    assert raw.item() != pytest.approx(-0.4, abs=1e-6)


# Refusals


def of(gate: object) -> dict[str, object]:
    return {"method": RectifiedGates(gate)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"droprate": 0.0}, "conv:out: droprate=0.0 must lie between 0 and 1, exclusive"),
        ({"droprate": 1.0}, "droprate=1.0 must lie"),
        ({"droprate": -0.1}, "droprate=-0.1 must lie"),
        ({"droprate": 1.5}, "droprate=1.5 must lie"),
        ({"droprate": math.nan}, "droprate=nan must lie"),
        ({"droprate": {"conv:out": 0.5, "fc1:in": 0.5, "fc2:in": 2}}, "fc2:in: droprate=2 must"),
        ({"droprate": {"conv:out": 0.5, "fc1:in": 0.5}}, "droprate: 'fc2:in' has no entry"),
        (
            {"droprate": dict.fromkeys([*Net.sites, "fc2.weight"], 0.5)},
            "droprate: 'fc2.weight' is not a group; the groups are conv:out, fc1:in, fc2:in",
        ),
        ({"sample": "weight"}, "sample='weight' is not known; use 'batch' or 'example'"),
        ({"readout": "mode"}, "readout 'mode' is not known to HardConcrete"),
        (of(torch.sigmoid), "gate must turn log_alpha into a Rectified, and gave Tensor"),
        (of(lambda a: hc.HardConcrete(a[1:])), r"shape of log_alpha, \[23\], and gave \[22"),
        (of(lambda a: hc.Rectified(Normal(a, 1.0))), "'paper' is not known to Rectified"),
    ],
)
def test_settings_are_checked_first(settings: dict[str, object], words: str) -> None:
    model = Net()
    with unchanged(model), pytest.raises(hc.HardConcreteError, match=words):
        hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites, **settings)


@pytest.mark.parametrize(
    "settings", [{"droprate": "0.5"}, {"method": hc.HardConcrete(torch.zeros(23))}]
)
def test_settings_of_another_type_are_refused_with_words(settings: dict[str, object]) -> None:
    model = Net()
    with unchanged(model), pytest.raises(ArgumentError):
        hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites, **settings)


def test_gates_are_put_on_once() -> None:
    gated = attach_net()
    for model in (gated, gated.model, gated.model.fc1, nn.Sequential(gated.model)):
        with (
            unchanged(gated),
            pytest.raises(SiteError, match=r"has gates already; .*: hc.remove_gates\(gated\)"),
        ):
            hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=["fc2:out"])


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"takes a module, not a str"):
        hc.attach_gates("net", torch.zeros(2, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet: call the model once"),
        (nn.Sequential(nn.Linear(4, 3, device="meta")), "meta device, and gates need weights"),
    ],
)
@pytest.mark.parametrize("sites", ["auto", ["0:in"]])
def test_a_model_without_values_is_refused(
    model: nn.Module, words: str, sites: str | list[str]
) -> None:
    with pytest.raises(ArgumentError, match=words):
        hc.attach_gates(model, torch.zeros(2, 4), sites=sites)


def test_an_empty_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 3))
    model[0].weight = nn.Parameter(torch.zeros(3, 0))
    with pytest.raises(SiteError, match=r"0\.weight is empty, so there is nothing to gate"):
        hc.attach_gates(model, torch.zeros(2, 0), sites=["0:in"])


@pytest.mark.parametrize("sample", ["batch", "example"])
def test_torchscript_is_refused(sample: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        model = nn.Sequential(torch.jit.script(nn.Linear(4, 3)))
    with pytest.raises(SiteError, match=r"attach the gates before torch\.jit\.script"):
        hc.attach_gates(model, torch.zeros(2, 4), sites=[hc.Site("0.weight", 1)], sample=sample)


@pytest.mark.parametrize("site", ["layer:in", "unused:in"])
def test_buffers_of_the_model_stay_as_they_were(site: str) -> None:
    model = Counter()
    refused = pytest.raises(SiteError, match="does not read") if site == "unused:in" else None
    with refused or nullcontext():
        hc.attach_gates(model, torch.zeros(2, 4), sites=[site])
    assert model.written == 0
    assert model.replaced.isnan()


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = Net()
    with pytest.raises(ArgumentError, match=r"conv\.weight was made in torch\.inference_mode"):
        hc.attach_gates(model, torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize("settings", [{}, {"sites": Net.sites}, {"keep_mean": True}])
@pytest.mark.parametrize("sample", ["batch", "example"])
def test_gates_attached_in_inference_mode_learn(settings: dict[str, Any], sample: Any) -> None:
    model = Net()
    with torch.inference_mode():
        gated = hc.attach_gates(model, torch.randn(2, 1, 4, 4), sample=sample, **settings)
        gated.expected("macs")
    before = gated.gates.log_alpha.detach().clone()
    costs = sum(gated.expected(cost) for cost in ("group_size", "macs"))
    (gated(torch.randn(2, 1, 4, 4)).sum() + costs).backward()
    torch.optim.Adam(gated.parameters()).step()
    assert (gated.gates.log_alpha != before).all()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.first(x))[0]


def test_recurrent_layers_are_refused_or_work() -> None:
    """They keep a list of their weights, which can hold a drawn product after the call."""
    model = Recurrent()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 4)
    sites = ["first:in", hc.Site("lstm.weight_ih_l0", 1)]
    try:
        gated = hc.attach_gates(model, x, sites=sites)
    except SiteError:
        with unchanged(model), pytest.raises(SiteError, match=r"lstm\.weight_ih_l0:1"):
            hc.attach_gates(model, x, sites=sites)
        return
    z = next_draw(gated)
    torch.testing.assert_close(gated(x), by_hand(plain, gated, z, x))
    for other in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        torch.testing.assert_close(other.eval()(x), gated.eval()(x))


@pytest.mark.parametrize(
    "sites",
    [[hc.Site("unused", 0)], [hc.Site("used", 0), hc.Site("unused", 0)]],
    ids=["alone", "beside one that is read"],
)
def test_a_parameter_that_its_module_does_not_read_is_refused(sites: list[hc.Site]) -> None:
    model = Scale()
    with unchanged(model), pytest.raises(SiteError, match="does not read unused"):
        hc.attach_gates(model, torch.zeros(2, 4), sites=sites)


@pytest.mark.parametrize("names", [("0.used", "0.unused"), ("0.used", "1.unused")])
def test_a_site_that_is_only_partly_read_is_refused(names: tuple[str, str]) -> None:
    model = nn.Sequential(Scale(), Scale())
    with unchanged(model), pytest.raises(SiteError, match=f"does not read {names[1]}"):
        hc.attach_gates(model, torch.zeros(2, 4), sites=[hc.Site(names, 0)])


@pytest.mark.parametrize(
    ("model", "sites", "words"),
    [
        (
            nn.Linear(4, 4),
            [":each"],
            ":each: single weights have no activation, .* use sample='batch'",
        ),
        (Scale(), [hc.Site("used", 0)], "used:0: a gate per example .* not for Scale"),
        (nn.Sequential(nn.LayerNorm(4)), [hc.Site("0.weight", 0)], "not for LayerNorm"),
        (nn.Sequential(nn.ConvTranspose1d(4, 4, 1)), ["0:in"], "not for ConvTranspose1d"),
        (nn.Linear(4, 4), [hc.Site("weight", 0)], "use sample='batch'"),
        (nn.Linear(4, 4), [hc.Site("bias", 0)], "use sample='batch'"),
        (nn.Conv1d(4, 4, 4), [hc.Site("weight", 2)], "use sample='batch'"),
    ],
    ids=["single weights", "own class", "norm", "transposed", "weight", "bias", "kernel"],
)
def test_no_gate_per_example_without_an_activation(
    model: nn.Module, sites: list[hc.Site | str], words: str
) -> None:
    with unchanged(model), pytest.raises(SiteError, match=words):
        hc.attach_gates(model, torch.zeros(4, 4), sites=sites, sample="example")


def test_inputs_that_do_not_fit_leave_the_model_as_it_was() -> None:
    model = Net()
    with unchanged(model), pytest.raises(ArgumentError, match="with these example inputs"):
        hc.attach_gates(model, torch.zeros(2, 1, 9, 9), sites=Net.sites)


class Final(Scale):
    """A class that cannot be derived from."""

    def __init_subclass__(cls) -> None:
        raise TypeError("this class is final")


def test_a_class_that_cannot_be_gated_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Final())
    with unchanged(model), pytest.raises(TypeError, match="final"):
        hc.attach_gates(model, torch.zeros(2, 4), sites=["0:in", hc.Site("1.used", 0)])
