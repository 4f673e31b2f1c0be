import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.structure import look as module
from hardconcrete.structure.look import Look


class Net(nn.Module):
    """Its forward decides by settings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.summed, self.dims = False, [1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(x.cumsum(1) if self.summed else x)


INPUT = torch.randn(3, 4)


def tied(net: Net) -> None:
    net.second.weight = net.second.weight
    net.second.bias = net.first.bias


def summed(net: Net) -> None:
    net.summed = True


def longer(net: Net) -> None:
    net.dims.append(2)


def finer(net: Net) -> None:
    net.double()


def wider(net: Net) -> None:
    net.last = nn.Linear(6, 3)


def of_another_class(net: Net) -> None:
    net.second = nn.Bilinear(6, 6, 6)


@pytest.mark.parametrize("change", [tied, summed, longer, finer, wider, of_another_class])
def test_it_fits_until_the_model_changes(change: Callable[[Net], None]) -> None:
    net = Net()
    look = Look.at(net, (INPUT,))
    other = copy.deepcopy(net).train().requires_grad_(False)
    assert look.fits(net)
    assert look.fits(other)
    change(net)
    assert not look.fits(net)


def test_it_does_not_keep_the_parameters() -> None:
    net = Net()
    look, weight = Look.at(net, (INPUT,)), weakref.ref(net.first.weight)
    del net
    gc.collect()
    assert weight() is None
    assert look.walk.tensors["first.weight"].shape == (6, 4)


def test_a_gated_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def counted(*args: object) -> object:
        traced.append(args)
        return trace(*args)  # type: ignore[arg-type]

    trace = module.trace
    monkeypatch.setattr(module, "trace", counted)
    gated = hc.attach_gates(Net(), INPUT).eval()
    gated.gates.log_alpha.data[::2] = -5.0
    gated.delivered("macs")
    copied = copy.deepcopy(gated)
    small = hc.compact(copied)
    assert len(traced) == 1
    assert torch.allclose(small(INPUT), gated(INPUT), atol=1e-6)


def test_a_model_that_was_changed_is_looked_at_again() -> None:
    """A sum over units needs them all, where the old graph would have let some go."""
    gated = hc.attach_gates(Net(), INPUT).eval()
    gated.model.summed = True  # type: ignore[assignment]
    gated.gates.log_alpha.data[::2] = -5.0
    small = hc.compact(gated)
    assert torch.allclose(small(INPUT), gated(INPUT), atol=1e-5)


def test_named_sites_are_looked_at_when_it_is_asked_for() -> None:
    gated = hc.attach_gates(Net(), INPUT, sites=["second:in"])
    assert gated._look is None
    hc.compact(gated)
    first = gated._look
    assert first is not None
    assert gated.ledger is not None
    assert gated._look is first


def test_it_does_not_travel() -> None:
    gated = hc.attach_gates(Net(), INPUT)
    there = pickle.loads(pickle.dumps(gated))
    assert gated._look is not None
    assert there._look is None
    assert there.delivered("macs") == gated.delivered("macs")
