"""Files whose plan was changed and that carry the checksum which belongs to the change."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import hardconcrete as hc
from hardconcrete.compaction.save_load import SMALL_MODEL
from hardconcrete.errors import HardConcreteError
from tests.compaction.networks import Joined


def forged(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the plan of a file, and give it the checksum that belongs to it."""
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
        content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    plan = json.loads(about["plan"])
    change(plan)
    SMALL_MODEL.write(file, content, json.dumps(plan))


def as_graph(plan: dict[str, Any]) -> None:
    plan["form"] = "graph"
    plan["inputs"] = [[{"shape": [2**30, 4], "dtype": "float32"}], {}]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "huge example": (as_graph, "take 17,179,869,184 bytes"),
    "no example": (lambda p: p.update(form="graph", inputs=None), "without example inputs"),
    "an unknown type": (
        lambda p: p.update(inputs=[[{"shape": [2], "dtype": "Tensor"}], {}]), "dtype of an input"
    ),
    "a shape of texts": (
        lambda p: p.update(inputs=[[{"shape": ["2"], "dtype": "bool"}], {}]), "shape of an input"
    ),
    "deep inputs": (lambda p: p.update(inputs=deep(100)), "nested up to 32 times"),
    "another form": (lambda p: p.update(form="pickle"), "form in this plan must be 'module' or"),
    "no method": (lambda p: p["attributes"].update({"left.forward": 1}), "sets left.forward to 1"),
    "no attribute": (lambda p: p["attributes"].update({"left.wide": 1}), "sets left.wide to 1"),
    "of torch": (lambda p: p["attributes"].update({"left.in_features": 1}), "left.in_features"),
    "no integer": (lambda p: p["attributes"].update({"left.x": True}), "attribute left.x .*a size"),
    "no module": (lambda p: p["attributes"].update({"nothing.x": 1}), "no module 'nothing'"),
    "selection": (lambda p: p["selections"].update({"left": [0, 9]}), "left has no 2 inputs"),
    "no layer": (lambda p: p["selections"].update({"": [0]}), "has no 1 inputs to select"),
    "an index too large": (lambda p: p["cuts"][0].update(kept=[99]), "rising indices below"),
    "an index twice": (lambda p: p["cuts"][0].update(kept=[1, 1]), "rising indices below"),
    "a negative index": (lambda p: p["cuts"][0].update(kept=[-1]), "must be indices"),
    "a text": (lambda p: p["cuts"][0].update(kept="01"), "must be indices"),
    "a large dimension": (lambda p: p["cuts"][0].update(dim=2**70), "along a dimension"),
    "a cut twice": (lambda p: p["cuts"].append(p["cuts"][0]), "one for each dimension"),
    "an infinite gate": (
        lambda p: p["scales"].append({"parameter": "left.bias", "dim": 0, "values": [math.inf]}),
        "must be finite numbers",
    ),
    "many gates": (
        lambda p: p["scales"].extend([{"parameter": "left.bias", "dim": 0, "values": []}] * 2000),
        "at most 1024 times",
    ),
    "too many units": (
        lambda p: p["groups"].update({"left": {"units": 1, "kept": [5]}}), "kept units of left"
    ),
    "a field too many": (lambda p: p["cuts"][0].update(more=1), "unexpected keyword"),
    "groups as a list": (lambda p: p.update(groups=[]), "no attribute"),
    "a long plan": (lambda p: p.update(modules="x" * 2**21), "has a header of"),
}  # fmt: skip


def deep(levels: int) -> object:
    part: object = []
    for _ in range(levels):
        part = [part]
    return part


@pytest.mark.parametrize(("change", "words"), FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_plan(file: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    forged(file, change)
    with pytest.raises(HardConcreteError, match=words):
        hc.load(file, Joined())


def test_the_module_form_needs_no_examples(file: Path, small: nn.Module) -> None:
    forged(file, lambda p: p.update(inputs=[[{"shape": [2**40], "dtype": "float64"}], {}]))
    x = torch.randn(3, 4)
    assert torch.equal(hc.load(file, Joined())(x), small(x))


def test_a_tensor_of_another_kind(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        plan = opened.metadata()["plan"]
        content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    SMALL_MODEL.write(file, content | {"head.bias": content["head.bias"].long()}, plan)
    with pytest.raises(HardConcreteError, match=r"head.bias is torch.int64 in the file and "):
        hc.load(file, Joined())


def test_indices_that_differ_from_the_plan(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    gated = hc.attach_gates(model, torch.zeros(2, 6), sites=["0:in"])
    gated.gates.log_alpha.data.copy_(torch.tensor([5.0, -5, 5, -5, 5, 5]))
    small = hc.compact(gated)
    assert hc.CompactionPlan.of(small).selections
    small[0].kept_inputs.fill_(99)  # type: ignore[index, union-attr, operator]
    hc.save(tmp_path / "m", small)
    with pytest.raises(HardConcreteError, match="0 selects other inputs in it than in the tensors"):
        hc.load(tmp_path / "m", nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
