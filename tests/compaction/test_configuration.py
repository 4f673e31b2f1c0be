"""A configuration says the sizes of the small model, or no file is written."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import hardconcrete as hc
from hardconcrete.compaction.configuration import Configuration
from hardconcrete.errors import CompactionError
from tests.compaction.configured import (
    HEADS,
    WIDTHS,
    Network,
    Reading,
    Scaled,
    Wrapped,
    network,
    x,
)

SOME_WIDTHS = {WIDTHS[0]: range(10), WIDTHS[1]: range(5, 15)}
SOME_HEADS = {HEADS[0]: [0, 2, 3], HEADS[1]: [0, 1, 2]}


def test_the_configuration_describes_a_uniform_model() -> None:
    """Its class builds the small model from it; the configuration of the dense one stays."""
    model = network()
    small: Any = hc.compact(model, x(), keep={**SOME_WIDTHS, **SOME_HEADS})
    settings = small.settings
    assert (settings.heads, settings.head_dim, settings.part.inner) == (3, 4, 10)
    assert (settings.width, settings.layers, settings.limit) == (16, 2, None)
    assert (model.settings.heads, model.settings.head_dim, model.settings.part.inner) == (
        4,
        None,
        24,
    )
    assert [block.attention.num_heads for block in small.blocks] == [3, 3]
    again = Network(settings).double()
    again.load_state_dict(small.state_dict())
    rows = x(3)
    torch.testing.assert_close(again(rows), small(rows))
    small.save_pretrained("a folder")
    assert small.files == ["a folder"]


def test_numbers_that_differ_between_layers_stay() -> None:
    """Modules know their own; the configuration changes where all layers agree."""
    keep = {**SOME_WIDTHS, HEADS[0]: [0], HEADS[1]: [0, 1, 2]}
    small: Any = hc.compact(network(), x(), keep=keep)
    assert (small.settings.part.inner, small.settings.heads) == (10, 4)
    assert [block.attention.num_heads for block in small.blocks] == [1, 3]
    with pytest.raises(CompactionError, match=r"does not describe blocks.0.attention.qkv.weight"):
        small.save_pretrained("a folder")
    for copied in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        with pytest.raises(CompactionError, match=r"uniform=True, and leave out with exclude"):
            copied.save_pretrained("a folder")


def test_a_number_of_some_layers_only() -> None:
    """A layer that lost no head has as many as the configuration says."""
    small: Any = hc.compact(network(), x(), keep={HEADS[0]: [0, 1, 3]})
    assert small.settings.heads == 4
    assert [block.attention.num_heads for block in small.blocks] == [3, 4]


def test_layers_that_read_the_configuration(tmp_path: Path) -> None:
    """Each gets a copy with its own numbers."""
    small: Any = hc.compact(network(Reading), x(), keep={HEADS[0]: [0], HEADS[1]: [0, 1, 2]})
    assert hc.CompactionPlan.of(small).form == "module"
    assert [block.attention.settings.heads for block in small.blocks] == [1, 3]
    assert small.settings.heads == 4
    hc.save(tmp_path / "small.safetensors", small)
    loaded: Any = hc.load(tmp_path / "small.safetensors", network(Reading))
    assert [block.attention.settings.heads for block in loaded.blocks] == [1, 3]


def test_heads_alike_that_no_number_describes() -> None:
    """The number of heads is true even where the class would compute another size of a head."""
    small: Any = hc.compact(network(heads=2), x(), keep={HEADS[0]: [1], HEADS[1]: [1]})
    assert (small.settings.heads, small.settings.head_dim) == (1, 8)
    plan = hc.CompactionPlan.of(small)
    assert plan.configurations == {"settings": Configuration({"head_dim": 8, "heads": 1})}


def test_plans_and_files_carry_the_numbers(tmp_path: Path) -> None:
    small: Any = hc.compact(network(), x(), keep={**SOME_WIDTHS, **SOME_HEADS})
    plan = hc.CompactionPlan.of(small)
    assert hc.CompactionPlan.from_json(plan.to_json()) == plan
    hc.save(tmp_path / "small.safetensors", small)
    loaded: Any = hc.load(tmp_path / "small.safetensors", network())
    assert loaded.settings == small.settings
    loaded.save_pretrained("a folder")
    free: Any = hc.compact(network(), x(), keep={WIDTHS[0]: [1, 2]})
    hc.save(tmp_path / "free.safetensors", free)
    with pytest.raises(CompactionError, match="save_pretrained would write a Network"):
        hc.load(tmp_path / "free.safetensors", network()).save_pretrained("")  # type: ignore[operator]


def test_frozen_parameters_stay_frozen() -> None:
    """Building the small model again does not change it."""
    model = network()
    model.head.requires_grad_(False)
    small: Any = hc.compact(model, x(), keep=SOME_WIDTHS)
    assert hc.CompactionPlan.of(small).configurations["settings"].is_complete
    assert not small.head.weight.requires_grad
    assert small.blocks[0].up.weight.requires_grad


def test_two_compactions() -> None:
    """The second plan is for the dense model; its configuration is the last one."""
    first: Any = hc.compact(network(), x(), keep=SOME_WIDTHS)
    second: Any = hc.compact(first, x(), keep={**SOME_HEADS, WIDTHS[0]: [1], WIDTHS[1]: [1]})
    assert (second.settings.part.inner, second.settings.heads) == (1, 3)
    applied: Any = hc.CompactionPlan.of(second).apply(network())
    assert applied.settings == second.settings


def test_a_number_that_is_more_than_a_size_stays() -> None:
    """The class would build tensors of the right shapes, and another function."""
    small: Any = hc.compact(network(Scaled), x(), keep=SOME_WIDTHS)
    assert small.settings.part.inner == 24
    with pytest.raises(CompactionError, match="does not describe"):
        small.save_pretrained("a folder")


def test_a_part_of_the_model_has_the_configuration() -> None:
    model = Wrapped(network(), 3).double()
    keep = {f"body.{name}": units for name, units in SOME_WIDTHS.items()}
    small: Any = hc.compact(model, x(), keep=keep)
    assert small.body.settings.part.inner == 10
    small.body.save_pretrained("a folder")
    assert [*hc.CompactionPlan.of(small).configurations] == ["body.settings"]
