"""Hugging Face families: exact, of their class, described by their configuration where it can."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hardconcrete as hc
from hardconcrete.errors import CompactionError
from tests.exactness import apart, assert_compacts, at_random, outputs

pytest.importorskip("transformers")

from tests.zoo.huggingface import EVERY_DAY, FAMILIES, Family

pytestmark = [
    pytest.mark.unwatched,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:the training ended above its budget"),
]

BY_DAY = [
    pytest.param(family, id=family.name, marks=[] if family.name in EVERY_DAY else pytest.mark.slow)
    for family in FAMILIES
]
CAUSAL = [each for each in BY_DAY if each.values[0].prompt(2)]  # type: ignore[attr-defined]


def gated_model(family: Family, *exclude: str) -> hc.GatedModel:
    torch.manual_seed(0)
    gated = hc.attach_gates(family.build(), *family.inputs(2), exclude=exclude)
    gated = at_random(gated).eval()
    gated.freeze_gates()
    return gated


def tolerance(family: Family) -> float:
    return 1e-9 if family.dtype == torch.float64 else 1e-5


def heads_of(gated: hc.GatedModel) -> tuple[str, ...]:
    return tuple(group.name for group in gated.groups if group.kind == "attention head")


@pytest.mark.parametrize("family", BY_DAY)
def test_any_mask_is_exact(family: Family, tmp_path: Path) -> None:
    """Random gates, another mask in each layer: oracle, form, class, file."""
    gated = gated_model(family)
    assert bool(heads_of(gated)) == family.heads
    small = assert_compacts(gated, family.inputs, tolerance(family))
    assert hc.CompactionPlan.of(small).form == family.form
    assert (type(small) is type(gated.model)) == (family.form == "module")
    hc.save(tmp_path / "small.safetensors", small)
    loaded = hc.load(tmp_path / "small.safetensors", family.build()).eval()
    three = family.inputs(3)
    assert apart(outputs(small.eval(), three), outputs(loaded, three)) <= tolerance(family)


def uniform_model(family: Family, *exclude: str) -> Any:
    gated = gated_model(family, *exclude)
    small = hc.compact(gated, budget=hc.Budget(gated, units=0.5, uniform=True, by="gates"))
    assert type(small) is type(gated.model)
    return small.eval()


def opened(family: Family, small: Any, folder: Path) -> Any:
    small.save_pretrained(folder)
    return type(small).from_pretrained(folder, dtype=family.dtype).eval()


@pytest.mark.parametrize("family", [each for each in BY_DAY if each.values[0].heads])  # type: ignore[attr-defined]
def test_uniform_heads_and_widths(family: Family, tmp_path: Path) -> None:
    """The stock class opens the model, or nothing is written."""
    small = uniform_model(family)
    if family.describes != "all":
        with pytest.raises(CompactionError, match="does not describe"):
            small.save_pretrained(tmp_path)
        assert not [*tmp_path.iterdir()]
        return
    two = family.inputs(2)
    assert apart(outputs(small, two), outputs(opened(family, small, tmp_path), two)) <= 1e-5


@pytest.mark.parametrize("family", BY_DAY)
def test_uniform_widths(family: Family, tmp_path: Path) -> None:
    """Without heads a configuration describes more models."""
    gated = gated_model(family)
    if len(heads_of(gated)) == len(gated.groups):
        pytest.skip("only heads are units")
    small = uniform_model(family, *heads_of(gated))
    if family.describes == "nothing":
        with pytest.raises(CompactionError, match="does not describe"):
            small.save_pretrained(tmp_path)
        return
    two = family.inputs(2)
    assert apart(outputs(small, two), outputs(opened(family, small, tmp_path), two)) <= 1e-5


@pytest.mark.parametrize("family", CAUSAL)
def test_generate(family: Family) -> None:
    """With a cache, the small model writes what the gated model writes."""
    gated = gated_model(family)
    if family.form == "graph":
        pytest.skip("a graph does not generate")
    small = hc.compact(gated).eval()
    prompt = family.prompt(2)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        expected = gated.model.generate(**copy.deepcopy(prompt), **settings)  # type: ignore[operator]
        assert torch.equal(small.generate(**prompt, **settings), expected)  # type: ignore[operator]


def test_prune_to_a_checkpoint(tmp_path: Path) -> None:
    """The whole way: a trained model, importance, re-fit, a folder that the stock class opens."""
    (family,) = (each for each in FAMILIES if each.name == "qwen3")
    torch.manual_seed(0)
    model = family.build()
    batches = [family.inputs(4)[1] for _ in range(3)]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch, labels=batch["input_ids"]).loss  # type: ignore[no-any-return]

    small: Any = hc.prune(
        model, (), batches, loss, kwargs=batches[0], macs=0.6, uniform=True, progress=False
    )
    assert small.config.intermediate_size < 48
    assert (model.config.intermediate_size, model.config.num_key_value_heads) == (48, 2)
    again = opened(family, small, tmp_path)
    rows = family.inputs(3)
    assert apart(outputs(small, rows), outputs(again, rows)) <= 1e-9
    assert again.num_parameters() == small.num_parameters() < model.num_parameters()
    prompt = family.prompt(2)
    lengths = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(again.generate(**prompt, **lengths), small.generate(**prompt, **lengths))
