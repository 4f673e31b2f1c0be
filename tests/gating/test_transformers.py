"""Models of Hugging Face with gates: checkpointing, compiled code, and half precision."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.errors import GateError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore", category=FutureWarning)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
WIDE = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 32}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32, **ENDS},
    "llama": {**WIDE, "num_key_value_heads": 2, **ENDS},
    "bert": WIDE,
}
IDS = torch.arange(48).view(4, 12) % 40


def model(name: str) -> nn.Module:
    """A small one without dropout."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    for key in vars(config):
        if "dropout" in key or key.endswith("_pdrop"):
            setattr(config, key, 0.0)
    config.use_cache = False
    return transformers.AutoModel.from_config(config).train()


def gated_model(name: str, dtype: torch.dtype = torch.float32) -> hc.GatedModel:
    torch.manual_seed(0)
    return hc.attach_gates(model(name).to(dtype), (), {"input_ids": IDS}).train()


def loss(gated: nn.Module, called: Any = None) -> Tensor:
    torch.manual_seed(1)
    output = (gated if called is None else called)(input_ids=IDS).last_hidden_state
    return output.float().square().mean()


def slopes(gated: nn.Module, value: Tensor) -> list[Tensor]:
    parameters = [p for p in gated.parameters() if p.requires_grad]
    return list(torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_checkpointing_gives_equal_gradients(name: str) -> None:
    gated = gated_model(name)
    expected = slopes(gated, loss(gated))
    gated.model.gradient_checkpointing_enable({"use_reentrant": False})
    found = slopes(gated, loss(gated))
    torch.testing.assert_close(found, expected)
    assert any(slope.any() for slope in found[-1:])  # those of the gates


@pytest.mark.parametrize("name", CONFIGS)
def test_reentrant_checkpointing_is_refused(name: str) -> None:
    """It would lose the gradients of the gates."""
    gated = gated_model(name)
    gated.model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(GateError, match="use_reentrant=False"):
        loss(gated).backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointing_with_gates_that_do_not_learn(name: str, *, reentrant: bool) -> None:
    """Frozen gates, and the steps of a budget that do not measure."""
    gated = gated_model(name)
    budget = hc.Budget(gated, units=0.9, steps=2000)
    state = budget.state_dict()
    state["open"][:5] = False
    budget.load_state_dict(state)
    for frozen in (False, True):
        gated.freeze_gates(frozen)
        gated.gates.measuring = False
        gated.model.gradient_checkpointing_disable()
        expected = slopes(gated.model, loss(gated))
        gated.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        gated.model.enable_input_require_grads()
        gated.model.zero_grad()
        loss(gated).backward()
        found = [p.grad for p in gated.model.parameters()]
        zero = [torch.zeros_like(slope) for slope in expected]
        found = [z if grad is None else grad for grad, z in zip(found, zero, strict=True)]
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_without_graph_breaks(name: str) -> None:
    from torch._inductor import config  # here, because it takes seconds

    gated = gated_model(name)
    expected = slopes(gated, loss(gated))
    compiled = torch.compile(gated, fullgraph=True)
    with config.patch(fallback_random=True):  # the same gates are drawn
        found = slopes(gated, loss(gated, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_compiled_under_a_budget_without_graph_breaks() -> None:
    """Closed units do not compile the model again."""
    torch._dynamo.reset()
    gated = gated_model("gpt2")
    budget = hc.Budget(gated, units=0.5, steps=2000)
    compiled = torch.compile(gated, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for measuring in (True, False):
            gated.gates.measuring = measuring
            loss(gated, compiled).backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for closed in range(0, 12, 3):
            state = budget.state_dict()
            state["open"][closed] = False
            budget.load_state_dict(state)
            for measuring in (True, False):
                gated.gates.measuring = measuring
                torch.testing.assert_close(loss(gated, compiled), loss(gated), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_bfloat16(name: str, how: str) -> None:
    """Close to float32, with gates and their gradients in float32."""
    wide = gated_model(name)
    expected = loss(wide)
    gated = gated_model(name, torch.bfloat16 if how == "weights" else torch.float32)
    gated.gates.load_state_dict(copy.deepcopy(wide.gates.state_dict()))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = loss(gated)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)
    found.backward()
    slope = gated.gates.log_alpha.grad
    assert slope is not None
    assert slope.dtype == torch.float32
    assert slope.isfinite().all()
    assert slope.any()
