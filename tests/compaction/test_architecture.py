"""Models that a plan is not for."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.compaction.architecture import classes_of, refuse_another_architecture, shapes_of
from hardconcrete.compaction.plan import Cut, Scale
from hardconcrete.errors import CompactionError
from tests.compaction.networks import TiedWords, dense


def test_shapes_have_every_name() -> None:
    shapes = shapes_of(TiedWords())
    assert shapes["words.weight"] == shapes["decoder.weight"] == (9, 6)


def test_a_digest_of_classes_and_paths() -> None:
    assert classes_of(dense()) == classes_of(dense().double())
    assert classes_of(dense()) != classes_of(nn.Sequential(*dense(), nn.ReLU()))


WRONG: dict[str, tuple[Callable[[], hc.CompactionPlan], str]] = {
    "size": (lambda: plan(cuts=(Cut("0.weight", 0, 7, (0,)),)),
             r"its 0.weight has the size 7 along dimension 0, and here it has the shape \[6, 4\]"),
    "dimension": (lambda: plan(cuts=(Cut("0.bias", 1, 6, (0,)),)), r"here it has the shape \[6\]"),
    "tensor": (lambda: plan(cuts=(Cut("9.weight", 0, 6, (0,)),)), "here is no such tensor"),
    "scale": (lambda: plan(scales=(Scale("2.weight", 1, (1.0,)),)), "has the size 1 along"),
    "entries": (lambda: plan(scales=(Scale("2.weight", None, (1.0,)),)), "its 2.weight has 1 ent"),
    "classes": (lambda: plan(modules="0"), "modules here are of other classes than in the plan"),
    "selection": (lambda: plan(selections={"9": (0,)}), "here is no module '9'"),
    "attribute": (lambda: plan(attributes={"9.width": 3}), "here is no module '9'"),
}  # fmt: skip


def plan(**parts: object) -> hc.CompactionPlan:
    return hc.CompactionPlan("Sequential", {}, **{"cuts": (), **parts})  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG.keys())
def test_refused(make: Callable[[], hc.CompactionPlan], words: str) -> None:
    with pytest.raises(CompactionError, match=f"the plan is for another architecture: .*{words}"):
        refuse_another_architecture(make(), dense())


def test_its_own_model_is_taken() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    refuse_another_architecture(hc.CompactionPlan.of(hc.compact(gated, keep={"0": [1]})), dense())
