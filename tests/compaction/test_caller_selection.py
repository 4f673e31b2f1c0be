import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.demo import MLP
from hardconcrete.errors import CompactionError


def pixels_gated() -> hc.GatedModel:
    torch.manual_seed(0)
    gated = hc.attach_gates(MLP(16, (8, 6)), torch.randn(2, 1, 4, 4), sites=["fc1:in", "fc2:in"])
    with torch.no_grad():
        gated.gates.log_alpha.copy_(3 * torch.randn(24))
    return gated


def test_the_caller_selects_the_pixels(tmp_path: Path) -> None:
    gated = pixels_gated()
    small = hc.compact(gated, kept_inputs_only=True)
    plan = hc.CompactionPlan.of(small)
    (kept,) = plan.kept_inputs.values()
    assert list(kept) == (gated.gate_values()["fc1:in"] > 0).nonzero().flatten().tolist()
    assert type(small.fc1) is nn.Linear
    assert small.fc1.in_features == len(kept) < 16
    x = torch.randn(5, 1, 4, 4)
    torch.testing.assert_close(small(x.flatten(1)[:, list(kept)]), gated.eval()(x))
    assert f"fc1: takes {len(kept)} inputs, which you select" in str(plan)
    assert hc.CompactionPlan.from_json(plan.to_json()) == plan
    hc.save(tmp_path / "small.safetensors", small)
    loaded = hc.load(tmp_path / "small.safetensors", MLP(16, (8, 6)))
    assert torch.equal(loaded(x.flatten(1)[:, list(kept)]), small(x.flatten(1)[:, list(kept)]))


def test_without_gates_on_the_input_there_is_nothing_to_select() -> None:
    gated = hc.attach_gates(MLP(16, (8, 6)), torch.randn(2, 1, 4, 4))
    before = copy.deepcopy(gated.state_dict())
    with pytest.raises(CompactionError, match="has 0 layers that select from the model's input"):
        hc.compact(gated, kept_inputs_only=True)
    assert all(torch.equal(value, before[name]) for name, value in gated.state_dict().items())


def test_a_graph_has_no_layer_to_give_inputs_to() -> None:
    with pytest.raises(CompactionError, match="in module form"):
        hc.compact(pixels_gated(), form="graph", kept_inputs_only=True)
