"""Models of transformers as they come: with their cache, called with what a tokenizer returns."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

SIZES = {"vocab_size": 40, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 24}
FAMILIES = {"Llama": LLAMA, "Qwen2": LLAMA, "GPT2": GPT2}
CLASSES = {"Llama": "LlamaForCausalLM", "Qwen2": "Qwen2ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def made(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    return getattr(transformers, CLASSES[family])(config).eval()


def encoded(rows: int = 2, length: int = 7) -> Any:
    ids = torch.arange(1, 1 + rows * length).view(rows, length) % 40
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def gated_and_small(family: str, form: Any) -> tuple[hc.GatedModel, Any]:
    gated = hc.attach_gates(made(family), encoded()).eval()
    gated.gates.log_alpha.data.normal_(0, 3)
    return gated, hc.compact(gated, form=form)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch, labels=batch["input_ids"]).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_units_although_the_cache_holds_them(family: str) -> None:
    model = made(family)
    before = copy.deepcopy(model.config.to_dict())
    found = hc.find_groups(model, encoded())
    assert [group.kind for group in found] == ["attention head", "neuron"] * 2
    assert model.config.to_dict() == before
    assert model.config.use_cache is True


@pytest.mark.parametrize("family", FAMILIES)
def test_the_small_model_generates_with_its_cache_what_the_gated_one_does(family: str) -> None:
    gated, small = gated_and_small(family, "module")
    assert type(small) is type(gated.model)
    assert small(**encoded()).past_key_values is not None
    settings = {"max_new_tokens": 6, "do_sample": False}
    tokens = gated.model.generate(**encoded(), **settings)
    assert torch.equal(small.generate(**encoded(), **settings), tokens)
    assert torch.equal(small.generate(**encoded(), **settings, use_cache=False), tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_form_takes_any_length_and_returns_no_cache(family: str) -> None:
    gated, small = gated_and_small(family, "graph")
    for rows, length in ((2, 7), (3, 11)):
        expected, actual = gated(**encoded(rows, length)), small(**encoded(rows, length))
        torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert actual.past_key_values is None


def test_prune_takes_what_a_tokenizer_returns() -> None:
    model, batches = made("Llama"), [encoded(4), encoded(4, 9)]
    small = hc.prune(model, encoded(1), batches, loss, macs=0.8)
    assert type(small) is type(model)
    report = hc.measure(model, small, encoded(1), batches=[1], repeats=2)
    assert report.after.macs <= 0.8 * report.before.macs
    gated = hc.attach_gates(model, encoded())
    assert sum(map(len, hc.importance(gated, batches, loss).values.values())) == gated.gates.count
