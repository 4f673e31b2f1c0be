import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.plan import Cut, KeptUnits
from hardconcrete.compaction.planner import make_plan
from hardconcrete.demo import MLP
from hardconcrete.gating import plain_copy
from tests.compaction.networks import Joined, Maps, TiedWords, at_random, dense, gap, with_shut

KEPT = tuple[int, ...]


def cuts(plan: hc.CompactionPlan) -> dict[tuple[str, int], KEPT]:
    return {(cut.tensor, cut.dim): cut.kept for cut in plan.cuts}


def test_every_axis_of_the_units_that_go() -> None:
    gated = with_shut(
        hc.attach_gates(Maps(), Maps.example()), {"conv1": [0, 4], "conv2": [1], "fc1": [2, 6]}
    )
    plan = make_plan(gated, plain_copy(gated))
    maps, more, units = (1, 2, 3, 5), (0, 2, 3, 4), (0, 1, 3, 4, 5)
    columns = tuple(16 // 4 * k + j for k in more for j in range(4))
    assert plan.groups == {
        "conv1": KeptUnits(6, maps),
        "conv2": KeptUnits(5, more),
        "fc1": KeptUnits(7, units),
    }
    assert cuts(plan) == {
        ("conv1.weight", 0): maps, ("conv1.bias", 0): maps,
        ("bn.weight", 0): maps, ("bn.bias", 0): maps,
        ("bn.running_mean", 0): maps, ("bn.running_var", 0): maps,
        ("slope.weight", 0): maps,
        ("depth.weight", 0): maps, ("depth.bias", 0): maps,
        ("conv2.weight", 1): maps, ("conv2.weight", 0): more, ("conv2.bias", 0): more,
        ("scale", 0): more, ("fc1.weight", 1): columns,
        ("fc1.weight", 0): units, ("fc1.bias", 0): units, ("fc2.weight", 1): units,
    }  # fmt: skip
    assert plan.attributes == {"instance.num_features": 4}
    assert plan.selections == {}
    assert plan.inputs == [[{"shape": [3, 2, 6, 6], "dtype": "float32"}], {}]


def test_open_gates_leave_nothing_to_do() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    nn.init.constant_(gated.gates.log_alpha, 9.0)
    plan = make_plan(gated, plain_copy(gated))
    assert (plan.cuts, plan.scales, plan.selections) == ((), (), {})
    assert torch.equal(hc.compact(gated)(x := torch.randn(5, 4)), gated.eval()(x))


def test_two_groups_on_one_dimension() -> None:
    gated = with_shut(hc.attach_gates(Joined(), torch.randn(3, 4)), {"left": [5], "right": [0, 3]})
    plan = make_plan(gated, plain_copy(gated))
    assert cuts(plan)["head.weight", 1] == (0, 1, 2, 3, 4, 7, 8, 10)
    scales = {scale.values for scale in plan.scales if scale.parameter == "head.weight"}
    left, right = (tuple(z.tolist()) for z in gated.gate_values().values())
    assert scales == {left + (1.0,) * 5, (1.0,) * 6 + right}


def test_tied_weights_are_scaled_and_cut_once() -> None:
    gated = with_shut(hc.attach_gates(TiedWords(), torch.randint(9, (3, 4))), {"words": [1, 5]})
    plan = make_plan(gated, plain_copy(gated))
    assert [scale.parameter for scale in plan.scales] == ["words.weight", "mix.weight"]
    assert Cut("words.weight", 1, 6, (0, 2, 3, 4)) in plan.cuts
    assert not any(cut.tensor.startswith("decoder") for cut in plan.cuts)


@pytest.fixture(scope="module")
def pixels() -> hc.GatedModel:
    torch.manual_seed(0)
    model = MLP(inputs=20, hidden=(9, 8))
    sites = ["fc1:in", "fc2:in", "fc3:in"]
    gated = hc.attach_gates(model, torch.randn(2, 4, 5), sites=sites)
    return with_shut(gated, {"fc1:in": [0, 1, 19], "fc2:in": [4], "fc3:in": [0, 7]})


def test_the_mlp_selects_its_pixels(pixels: hc.GatedModel) -> None:
    plan = make_plan(pixels, plain_copy(pixels))
    assert plan.selections == {"fc1": tuple(range(2, 19))}
    assert cuts(plan)["fc1.weight", 1] == tuple(range(2, 19))
    assert plan.groups == {
        "fc1": KeptUnits(9, (0, 1, 2, 3, 5, 6, 7, 8)),
        "fc2": KeptUnits(8, (1, 2, 3, 4, 5, 6)),
    }
    small = hc.compact(pixels)
    assert (small.fc1.in_features, small.fc1.out_features) == (17, 8)
    assert gap(pixels, small, torch.randn(7, 4, 5)) < 1e-5


class Normed(nn.Module):
    """Tied layers with a layer norm between: no width can go, and no one alone can select."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


def test_tied_layers_do_not_select() -> None:
    gated = with_shut(hc.attach_gates(Normed(), torch.randn(3, 6), sites=["first:in"]),
                      {"first:in": [0, 3]})  # fmt: skip
    with pytest.warns(hc.HardConcreteWarning, match="first:in: 2 of 6 gates are closed, and the"):
        small = hc.compact(gated)
    assert small.first.weight is small.second.weight
    assert (small.first.weight[:, [0, 3]] == 0).all()
    assert gap(gated, small, torch.randn(5, 6)) < 1e-5


class Twice(nn.Module):
    """One layer, used twice and known under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.again, self.norm = self.layer, nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.norm(self.layer(x)))


def test_a_layer_used_twice_selects_twice() -> None:
    gated = hc.attach_gates(Twice(), torch.randn(3, 6), sites=["layer:in"])
    small = hc.compact(with_shut(gated, {"layer:in": [0, 3]}))
    assert small.layer is small.again
    assert small.layer.in_features == 4
    assert gap(gated, small, torch.randn(5, 6)) < 1e-5


class Nested(nn.Module):
    """Takes a tuple of tensors, a mapping and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, both: tuple[Tensor, Tensor], more: dict[str, Tensor], twice: bool) -> Tensor:
        h = self.a(both[0] + both[1] * more["weight"])
        return self.b(h.relu()) * (2 if twice else 1)


def nested(batch: int) -> tuple[object, ...]:
    both = torch.randn(batch, 4), torch.randn(batch, 4)
    return both, {"weight": torch.rand(batch, 1)}


def test_nested_inputs_are_recorded() -> None:
    gated = hc.attach_gates(Nested(), nested(3), {"twice": True})
    plan = make_plan(at_random(gated), plain_copy(gated))
    tensor = {"shape": [3, 4], "dtype": "float32"}
    weight = {"weight": {"shape": [3, 1], "dtype": "float32"}}
    assert plan.inputs == [[{"tuple": [tensor, tensor]}, weight], {"twice": True}]
    assert hc.CompactionPlan.from_json(plan.to_json()) == plan


def test_the_plan_is_the_same_in_both_modes() -> None:
    gated = at_random(hc.attach_gates(Maps(), Maps.example()))
    assert make_plan(gated.train(), plain_copy(gated)) == make_plan(gated.eval(), plain_copy(gated))


def test_a_copy_without_gates() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 6), b=nn.Linear(6, 2)))
    plain = copy.deepcopy(model)
    gated = hc.attach_gates(model, torch.randn(3, 4))
    found = plain_copy(gated)
    assert found is not model
    assert str(found) == str(plain)
    assert str(gated.model) != str(plain)
