import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

import hardconcrete as hc
from hardconcrete.compaction.plan import Cut, KeptUnits, Scale
from hardconcrete.errors import ArgumentError, CompactionError
from hardconcrete_paper.models import LeNet5
from tests.compaction.networks import Maps, dense, gap, with_shut

SHUT = {"conv1": [0, 4], "conv2": [1], "fc1": [2, 3, 6]}


@pytest.fixture(scope="module")
def gated() -> hc.GatedModel:
    torch.manual_seed(0)
    return with_shut(hc.attach_gates(Maps(), Maps.example()), SHUT)


def test_it_prints_what_stays_of_each_group() -> None:
    gated = hc.attach_gates(LeNet5(), torch.randn(2, 1, 28, 28))
    shut = {"conv1": range(3), "conv2": range(0, 32), "fc1": range(7, 107)}
    plan = hc.CompactionPlan.of(hc.compact(with_shut(gated, shut)))
    assert str(plan).splitlines() == [
        "LeNet5, as module", "conv1: 17 of 20", "conv2: 18 of 50", "fc1: 400 of 500",
    ]  # fmt: skip


def test_selections_are_printed() -> None:
    plan = hc.CompactionPlan("M", {"a": KeptUnits(3, (0, 2))}, (), selections={"fc": (0, 4)})
    assert str(plan) == "M, as module\na: 2 of 3\nfc: selects 2 inputs"


def test_the_least_plan() -> None:
    plan = hc.CompactionPlan("M", {}, ())
    assert str(plan) == "M, as module"
    assert hc.CompactionPlan.from_json(plan.to_json()) == plan


def test_it_holds_no_weights(gated: hc.GatedModel) -> None:
    """The same gates on other weights give the same plan."""
    first = hc.CompactionPlan.of(hc.compact(gated))
    other = hc.attach_gates(Maps(), Maps.example())
    other.gates.load_state_dict(gated.gates.state_dict())
    assert hc.CompactionPlan.of(hc.compact(other)) == first
    with pytest.raises(FrozenInstanceError):
        first.form = "graph"  # type: ignore[misc]


@pytest.mark.parametrize("form", ["module", "graph"])
def test_json_and_back(gated: hc.GatedModel, form: str) -> None:
    plan = hc.CompactionPlan.of(hc.compact(gated, form=form))  # type: ignore[arg-type]
    assert plan.form == form
    again = hc.CompactionPlan.from_json(json.dumps(json.loads(plan.to_json())))
    assert again == plan
    assert again.scales[0].values == plan.scales[0].values


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"model": "M", "groups": []}'])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(ArgumentError, match="this text is no plan"):
        hc.CompactionPlan.from_json(text)


@pytest.mark.parametrize("form", ["module", "graph"])
def test_it_applies_to_a_fresh_model(gated: hc.GatedModel, form: str) -> None:
    """With the gated model's own dense weights, scaled and cut, it computes the same."""
    small = hc.compact(gated, form=form)  # type: ignore[arg-type]
    plan = hc.CompactionPlan.from_json(hc.CompactionPlan.of(small).to_json())
    fresh = Maps()
    fresh.load_state_dict(gated.model.state_dict())
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    x = Maps.example(4)
    made = plan.apply(fresh, Maps.example())
    assert hc.CompactionPlan.of(made) == plan
    assert gap(gated, made, x) < 1e-5
    torch.testing.assert_close(made.eval()(x), small.eval()(x), rtol=0, atol=0)
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_graph_needs_inputs(gated: hc.GatedModel) -> None:
    plan = replace(hc.CompactionPlan.of(hc.compact(gated)), form="graph")
    with pytest.raises(ArgumentError, match="example_inputs are needed"):
        plan.apply(Maps())


def test_a_plain_model_carries_none() -> None:
    with pytest.raises(ArgumentError, match="this Linear carries no plan: it was not made by"):
        hc.CompactionPlan.of(nn.Linear(2, 2))


WRONG = {
    "another size": (hc.CompactionPlan("S", {}, (Cut("0.weight", 0, 7, (1,)),)),
                     "its 0.weight has the size 7 along dimension 0, and here it has the shape"),
    "no such tensor": (hc.CompactionPlan("S", {}, (Cut("9.weight", 0, 7, (1,)),)),
                       "and here is no such tensor"),
    "fewer dimensions": (hc.CompactionPlan("S", {}, (Cut("0.bias", 1, 6, (1,)),)), "dimension 1"),
    "a scale": (hc.CompactionPlan("S", {}, (), (Scale("0.weight", 1, (0.5,)),)), "size 1 along"),
    "single weights": (hc.CompactionPlan("S", {}, (), (Scale("0.weight", None, (0.5,)),)),
                       "its 0.weight has 1 entries"),
    "a selection": (hc.CompactionPlan("S", {}, (), selections={"fc": (0,)}), "no module 'fc'"),
    "an attribute": (hc.CompactionPlan("S", {}, (), attributes={"fc.width": 3}), "no module 'fc'"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize(("plan", "words"), WRONG.values(), ids=WRONG.keys())
def test_another_architecture(plan: hc.CompactionPlan, words: str, form: str) -> None:
    with pytest.raises(CompactionError, match="the plan is for another architecture") as error:
        replace(plan, form=form).apply(dense(), torch.randn(2, 4))
    assert words in str(error.value)


def test_a_plan_of_an_older_file_is_read() -> None:
    """Its key for the inputs that the caller selects was another one."""
    plan = hc.CompactionPlan("M", {}, (), kept_inputs={"fc": (0, 2)})
    content = json.loads(plan.to_json())
    content["given"] = content.pop("kept_inputs")
    assert hc.CompactionPlan.from_json(json.dumps(content)) == plan
