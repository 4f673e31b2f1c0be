import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import hardconcrete as hc
from hardconcrete.errors import GateError
from tests.gating.networks import Net
from tests.gating.oracles import (
    anatomy,
    open_all,
    spread,
)


def test_the_users_classes_are_still_there() -> None:
    model = Net()
    keys = list(model.state_dict())
    gated = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites)
    assert gated.model is model
    assert type(model) is Net
    assert isinstance(model.fc1, nn.Linear)
    assert type(model.bn) is nn.BatchNorm2d
    assert list(model.state_dict()) == keys
    assert "_hardconcrete" not in dict(model.fc1.named_children())


def test_a_gated_layer_calls_its_hooks() -> None:
    model, calls = Net(), []
    model.fc1.register_forward_hook(lambda *_: calls.append("after"))
    gated = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites)
    calls.clear()
    gated(torch.zeros(2, 1, 4, 4))
    assert calls == ["after"]


def test_a_training_model_can_be_printed() -> None:
    """Some layers look at their bias to describe themselves."""
    model = Net()
    described = repr(model.conv)
    gated = hc.attach_gates(model, torch.zeros(2, 1, 4, 4), sites=Net.sites)
    assert described in repr(gated.eval())
    assert described in repr(gated.train())


def test_a_gated_parameter_cannot_be_taken_away_or_parametrized() -> None:
    layer = nn.Linear(4, 3)
    gated = hc.attach_gates(layer, torch.zeros(2, 4), sites=[":in"]).eval()
    before = anatomy(layer)
    for change in (weight_norm, lambda module: delattr(module, "weight")):
        with pytest.raises(GateError, match="weight has gates, so it cannot be removed"):
            change(layer)
        assert anatomy(layer) == before
    layer.extra = 1
    del layer.extra, layer.bias
    assert not hasattr(layer, "extra")
    assert list(dict(layer.named_parameters())) == ["weight"]
    assert hc.remove_gates(gated) is layer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_the_inner_model_keep_gates_of_their_own(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    gated = spread(hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=Net.sites)).eval()
    x = torch.randn(2, 1, 4, 4)
    other = copied(gated.model)
    before = gated(x)
    assert torch.equal(other(x), before)
    open_all(gated)
    assert torch.equal(other(x), before)
    assert not torch.equal(gated(x), before)
