import copy
import gc
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.planner import make_plan
from hardconcrete.gating import plain_copy
from hardconcrete.units import Analysis, analysis, analyze
from tests.zoo import GATED, Entry, gated_network


class Settings:
    """As of a library of its own."""

    def __init__(self) -> None:
        self.summed, self.inner = False, {"power": [1]}

    def is_summed(self) -> bool:
        return self.summed


class History(deque[int]):
    """A container that is not written in Python, with attributes."""


class Slots:
    """What is in slots is in no ``__dict__``."""

    __slots__ = ("power",)

    def __init__(self) -> None:
        self.power = 1


class HalfSlots(Slots):
    """Has a ``__dict__``, too."""


class ByName(dict[str, int]):
    """A mapping with attributes."""

    power = 1


class Net(nn.Module):
    """Its forward decides by settings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.repeats, self.dims, self.by_name = 1, (1, 1), {"summed": False}
        self.settings, self.names, self.unknown = Settings(), {"second"}, None
        self.activation: Callable[..., Tensor] = torch.relu
        self.rounded = partial(torch.round, decimals=2)
        self.mapping, self.method = ByName(), Settings().is_summed

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.activation(self.first(x)))
        summed = self.by_name["summed"] or self.settings.summed
        return self.last(x.cumsum(1) if summed else x)


INPUT = torch.randn(3, 4)


def tied(net: Net) -> None:
    net.second.bias = net.first.bias


def repeated(net: Net) -> None:
    net.repeats = 2


def longer(net: Net) -> None:
    net.dims = (*net.dims, 2)


def summed_by_name(net: Net) -> None:
    net.by_name["summed"] = True


def summed_by_settings(net: Net) -> None:
    net.settings.summed = True


def set_deep_inside(net: Net) -> None:
    net.settings.inner["power"].append(2)


def renamed(net: Net) -> None:
    net.names.add("first")


def activated(net: Net) -> None:
    net.activation = torch.tanh


def rounded(net: Net) -> None:
    net.rounded = partial(torch.round, decimals=3)


def hooked(net: Net) -> None:
    net.second.register_forward_hook(lambda _module, _args, y: y.cumsum(1))


def reordered(net: Net) -> None:
    net._modules["first"] = net._modules.pop("first")


def with_something_unknown(net: Net) -> None:
    net.unknown = iter([1])


def with_a_container(net: Net) -> None:
    net.unknown = History([1])


def with_slots(net: Net) -> None:
    net.unknown = HalfSlots()


def with_an_attribute_of_a_mapping(net: Net) -> None:
    net.mapping.power = 2


def with_a_method_of_another(net: Net) -> None:
    settings = Settings()
    settings.summed = True
    net.method = settings.is_summed


def finer(net: Net) -> None:
    net.double()


def wider(net: Net) -> None:
    net.last = nn.Linear(6, 3)


def of_another_class(net: Net) -> None:
    net.second = nn.Bilinear(6, 6, 6)


CHANGES = [
    tied, repeated, longer, summed_by_name, summed_by_settings, set_deep_inside, renamed, activated,
    rounded, hooked, reordered, with_something_unknown, with_a_container, with_slots,
    with_an_attribute_of_a_mapping, with_a_method_of_another, finer, wider, of_another_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_it_fits_until_the_model_changes(change: Callable[[Net], None]) -> None:
    net = Net()
    found = analyze(net, (INPUT,))
    other = copy.deepcopy(net).train().requires_grad_(False)
    assert found.fits(net)
    assert found.fits(other)
    change(net)
    assert not found.fits(net)


@pytest.mark.parametrize("change", [with_something_unknown, with_a_container, with_slots])
def test_what_cannot_be_compared_never_fits(change: Callable[[Net], None]) -> None:
    net = Net()
    change(net)
    assert not analyze(net, (INPUT,)).fits(net)


def test_settings_may_contain_themselves() -> None:
    net = Net()
    net.settings.inner["all"] = net.settings  # type: ignore[assignment]
    assert analyze(net, (INPUT,)).fits(copy.deepcopy(net))


def test_rounding_of_products_is_a_part_of_the_graph() -> None:
    net = Net()
    found = analyze(net, (INPUT,))
    with torch.autocast("cpu", torch.bfloat16):
        assert not found.fits(net)


def test_it_does_not_keep_the_model() -> None:
    net, example = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), INPUT.clone()
    kept = [*net.parameters(), *net.buffers(), example]
    found, refs = analyze(net, (example,)), [weakref.ref(tensor) for tensor in kept]
    del net, example, kept
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert found.labelled.tensors["0.weight"].shape == (6, 4)


def test_a_model_is_traced_once_on_the_way_to_a_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = []

    def counted(*args: object) -> object:
        traced.append(args)
        return trace(*args)  # type: ignore[arg-type]

    trace = analysis.trace
    monkeypatch.setattr(analysis, "trace", counted)
    net = Net()
    hc.find_groups(net, INPUT)
    gated = hc.attach_gates(net, INPUT, droprate=0.5).eval()
    gated.gates.log_alpha.data[::2] = -5.0
    gated.delivered("macs")
    gated.measure_latency(repeats=2)
    copied = copy.deepcopy(gated)
    small = hc.compact(copied)
    assert len(traced) == 1
    assert torch.allclose(small(INPUT), gated(INPUT), atol=1e-6)


@pytest.mark.parametrize("entry", GATED[::12], ids=[entry.name for entry in GATED[::12]])
def test_a_kept_analysis_equals_a_new_one(entry: Entry) -> None:
    kept = gated_network(entry)
    kept.gates.log_alpha.data[::3] = -9.0
    fresh = copy.deepcopy(kept)
    fresh._latest = fresh.cost_tables.ledger = None
    assert torch.equal(kept.ledger.dense, fresh.ledger.dense)
    open_ones = torch.rand(5, len(kept.gates.log_alpha)).round()
    for is_open in open_ones:
        assert torch.equal(kept.ledger.cost(is_open), fresh.ledger.cost(is_open))
    assert make_plan(kept, plain_copy(kept)) == make_plan(fresh, plain_copy(fresh))


@pytest.mark.parametrize("change", [summed_by_name, summed_by_settings, hooked])
def test_a_model_that_was_changed_is_analyzed_again(change: Callable[[Net], None]) -> None:
    """A sum over units needs them all, where the old graph would have let some go."""
    gated = hc.attach_gates(Net(), INPUT, droprate=0.5).eval()
    change(gated.model)  # type: ignore[arg-type]
    gated.gates.log_alpha.data[::2] = -5.0
    small = hc.compact(gated)
    assert torch.allclose(small(INPUT), gated(INPUT), atol=1e-5)
    assert gated.delivered("params").item() == hc.count(small, INPUT).params


def test_what_loads_a_state_does_not_matter() -> None:
    """The hook of a weight norm is another one in a copy."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 2))
    assert analyze(net, (torch.zeros(2, 6),)).fits(copy.deepcopy(net))


def test_an_analysis_made_in_inference_mode_serves_outside() -> None:
    gated = hc.attach_gates(Net(), INPUT, sites=["second:in", "last:in"]).eval()
    gated.gates.log_alpha.data[::2] = -20.0
    with torch.inference_mode():
        gated.delivered("macs")
    assert torch.allclose(hc.compact(gated)(INPUT), gated(INPUT), atol=1e-6)
    assert hc.shrink(gated, None)
    assert gated._latest is None


def changed_weights(net: Net) -> None:
    net.last = nn.Linear(6, 3)


@pytest.mark.parametrize("other", ["model", "batch", "features", "copy"])
def test_another_call_is_analyzed_anew(other: str) -> None:
    net = Net()
    first = hc.find_groups(net, INPUT)
    assert hc.find_groups(net, torch.zeros(3, 4)) is first  # numbers do not matter
    if other == "model":
        changed_weights(net)
    inputs = torch.zeros(5, 4) if other == "batch" else INPUT
    again = hc.find_groups(
        copy.deepcopy(net) if other == "copy" else net, inputs, input_features=other == "features"
    )
    assert again is not first
    assert again.names[-1:] == first.names[-1:]


def test_the_analysis_of_a_model_that_is_gone_is_freed() -> None:
    found = weakref.ref(hc.find_groups(Net(), INPUT))
    gc.collect()
    assert found() is None


def test_a_model_that_its_hook_refers_to_is_freed() -> None:
    net = Net()
    net.register_forward_hook(lambda *_, own=net: own.repeats and None)
    analyze(net, (INPUT,))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_a_pickled_analysis_has_groups_and_no_graph() -> None:
    net = Net()
    found = hc.find_groups(net, INPUT)
    there: Analysis = pickle.loads(pickle.dumps(found))
    assert str(there) == str(found)
    assert not there.fits(net)


def test_named_sites_are_traced_when_costs_are_asked_for() -> None:
    gated = hc.attach_gates(Net(), INPUT, sites=["second:in"])
    assert gated._latest is None
    hc.compact(gated)
    first = gated._latest
    assert first is not None
    assert gated.ledger is not None
    assert gated._latest is first


def test_it_does_not_travel() -> None:
    gated = hc.attach_gates(Net(), INPUT)
    there = pickle.loads(pickle.dumps(gated))
    assert gated._latest is not None
    assert there._latest is not gated._latest
    assert there.delivered("macs") == gated.delivered("macs")
