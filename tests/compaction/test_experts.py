"""Experts of Hugging Face models, whose weights are stacked and chosen by data."""

from typing import Any

import pytest
import torch

import hardconcrete as hc
from tests.exactness import assert_compacts, at_random

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def model(family: str, experts: str) -> Any:
    """A tiny model with weights at random."""
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    sizes = {"head_dim": 4, "moe_intermediate_size": 12, "num_experts": 4}
    sizes = sizes if family == "Qwen3Moe" else {"num_local_experts": 4}
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes, num_experts_per_tok=2)
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if not hasattr(made, "set_experts_implementation"):
        pytest.skip("this transformers computes experts in one way only")
    made.set_experts_implementation(experts)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def inputs(batch: int) -> Any:
    return (), {"input_ids": torch.randint(30, (batch, 5))}


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_the_width_of_experts(family: str, experts: str) -> None:
    """It is one group for all experts of a layer; the experts themselves stay, for a reason."""
    found = hc.find_groups(model(family, experts), *inputs(2))
    assert [(group.kind, group.units) for group in found] == [("attention head", 2), ("neuron", 12)]
    stays = [str(fixed) for fixed in found.fixed if "data choose among these experts" in str(fixed)]
    assert all(": 4 fixed" in text for text in stays)
    assert len(stays) == 2
    macs = hc.count(model(family, experts), *inputs(2)).macs
    assert sum(each.macs for each in found.labelled.state.contractions) == macs


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_small_experts_are_exact(family: str) -> None:
    gated = at_random(hc.attach_gates(model(family, "batched_mm"), *inputs(2)))
    small = assert_compacts(gated, inputs)
    assert type(small) is type(gated.model)
    count = hc.count(small, *inputs(2))
    assert (gated.delivered("params"), gated.delivered("macs")) == (count.params, count.macs)


def test_products_in_groups_need_aligned_widths() -> None:
    """torch's kernel takes rows of 16 bytes, four numbers of float32, so widths are rounded."""
    gated = at_random(hc.attach_gates(model("Mixtral", "grouped_mm"), *inputs(2)))
    small = hc.compact(gated, round_to=4, form="module")
    width = small.get_parameter("model.layers.0.mlp.experts.down_proj").shape[2]
    assert width in (4, 8)
    assert hc.count(small, *inputs(2)).macs == hc.count(small, *inputs(1)).macs * 2


def test_experts_in_a_loop_are_refused() -> None:
    with pytest.raises(hc.errors.TraceError, match="set_experts_implementation"):
        hc.find_groups(model("Mixtral", "eager"), *inputs(2))
