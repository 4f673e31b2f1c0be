"""What tools see of a gated layer in training, outside of a call: the parameter itself."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import hardconcrete as hc
from hardconcrete.errors import GateError
from tests.gating import workers
from tests.gating.networks import Net, SelfAttention
from tests.gating.oracles import spread
from tests.processes import in_processes


def make() -> hc.GatedModel:
    return spread(hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=Net.sites))


def test_outside_of_a_call_a_weight_is_the_parameter() -> None:
    gated = make()
    layer = gated.model.fc1
    assert layer.weight is layer._parameters["weight"]
    assert getattr(gated.model.conv, "bias", None) is gated.model.conv._parameters["bias"]
    with gated.draw():
        assert layer.weight is not layer._parameters["weight"]
    gated.eval()
    assert not torch.equal(layer.weight, layer._parameters["weight"])


def test_a_weight_is_read_raw_in_a_hook_around_the_gated_model() -> None:
    """Sharded training prepares parameters in such hooks."""
    gated, seen = make(), []
    holder = nn.Sequential(gated)
    for module in (gated, holder):
        module.register_forward_pre_hook(lambda *_: seen.append(gated.model.fc1.weight))
    holder(torch.randn(2, 1, 4, 4))
    assert all(weight is gated.model.fc1._parameters["weight"] for weight in seen)
    assert len(seen) == 2


class Direct(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(4) if norm else nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layer.weight


@pytest.mark.parametrize("norm", [True, False])
def test_a_forward_outside_of_a_draw_is_refused(norm: bool) -> None:
    site = hc.Site("layer.weight", 0)
    gated, x = hc.attach_gates(Direct(norm), torch.zeros(4, 4), sites=[site]), torch.randn(4, 4)
    for call in (gated.model, gated.model.forward, gated.model.layer, gated.model.layer.forward):
        with pytest.raises(GateError, match="in training they are drawn for one call"):
            call(x)
        with pytest.raises(GateError, match="in training they are drawn for one call"):
            nn.Sequential(gated.model)(x) if call is gated.model else call(x)
    gated(x)
    with gated.draw():
        gated.model(x)


def test_a_layer_that_reads_the_weights_of_another_is_refused() -> None:
    """Attention reads its last layer, and its forward is the only one that runs."""
    model = SelfAttention()
    gated = hc.attach_gates(model, torch.zeros(2, 3, 4), sites=["attention.out_proj:in"])
    x = torch.zeros(2, 3, 4)
    for call in (model, model.attention.forward):
        with pytest.raises(GateError, match="in training they are drawn for one call"):
            call(x) if call is model else call(x, x, x)
    gated(x)


def test_a_recomputed_function_sees_the_gates_of_its_forward() -> None:
    gated = hc.attach_gates(nn.Linear(4, 4), torch.zeros(2, 4), sites=[":in"], droprate=0.5)
    layer, x = gated.model, torch.randn(8, 4)

    def loss(x: Tensor) -> Tensor:
        return (x @ layer.weight.T).square().sum()

    slopes = []
    for again in (False, True):
        torch.manual_seed(3)
        with gated.draw():
            value = checkpoint(loss, x, use_reentrant=False) if again else loss(x)
        slopes.append(torch.autograd.grad(value, [*gated.parameters()][:1]))
    torch.testing.assert_close(*slopes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tools_of_torch(tmp_path: Path) -> None:
    gated, other = make(), make()
    nn.init.zeros_(other.model.fc1.weight)
    assert not other.model.fc1._parameters["weight"].any()
    vector_to_parameters(parameters_to_vector(gated.parameters()), other.parameters())
    for name, own in gated.named_parameters():
        assert torch.equal(own, other.get_parameter(name))
    assert repr(gated.model.fc1) == repr(Net().fc1).replace("Linear", "GatedLinear")
    with pytest.raises(GateError, match="weight has gates, so it cannot be removed"):
        parametrizations.weight_norm(gated.model.fc1)
    third = make()
    dcp.save(get_model_state_dict(gated), checkpoint_id=tmp_path / "state")
    state = get_model_state_dict(third)
    dcp.load(state, checkpoint_id=tmp_path / "state")
    set_model_state_dict(third, state)
    torch.testing.assert_close(third.state_dict(), gated.state_dict(), rtol=0, atol=0)


def test_fully_sharded_training(tmp_path: Path) -> None:
    """One process, on the CPU: the same numbers as without sharding."""
    in_processes(1, workers.fully_sharded_step, tmp_path)
    sharded, plain = torch.load(tmp_path / "rank0.pt")
    torch.testing.assert_close(sharded, plain)
