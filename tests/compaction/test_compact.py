import copy

import pytest
import torch
from torch import Tensor, nn

import hardconcrete as hc
from hardconcrete.compaction.graph_form import CompactedGraph
from hardconcrete.errors import ArgumentError, CompactionError, TraceError
from hardconcrete_paper.models import LeNet5
from tests.compaction.networks import (
    Averaged,
    Joined,
    Maps,
    Sized,
    TiedWords,
    at_random,
    dense,
    gap,
    with_shut,
)
from tests.gating.oracles import anatomy

PAPER = ["conv1:out", "conv2:out", "fc1:in", "fc2:in"]


def snapshot(gated: hc.GatedModel) -> list[object]:
    """All that compaction could change in its input."""
    return [
        *anatomy(gated),
        [(name, tensor.clone().flatten().tolist()) for name, tensor in gated.state_dict().items()],
        [p.grad is None for p in gated.parameters()],
        [id(group) for group in gated.groups],
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize("training", [True, False])
def test_it_never_touches_its_input(form: str, training: bool) -> None:
    model = Joined()
    gated = at_random(hc.attach_gates(model, torch.randn(3, 4))).train(training)
    model.left.train(not training)
    before = snapshot(gated)
    small = hc.compact(gated, form=form)  # type: ignore[arg-type]
    assert snapshot(gated) == before
    for tensor in (*small.parameters(), *small.buffers()):
        tensor.data.zero_()
    assert snapshot(gated) == before


def test_a_refusal_leaves_its_input_alone() -> None:
    gated = at_random(hc.attach_gates(Averaged(), torch.randn(3, 4)))
    before = snapshot(gated)
    with pytest.raises(CompactionError):
        hc.compact(gated, form="module")
    assert snapshot(gated) == before


@pytest.fixture(scope="module")
def maps() -> hc.GatedModel:
    torch.manual_seed(0)
    return hc.attach_gates(Maps(), Maps.example())


@pytest.mark.parametrize(
    ("form", "seed"), [("module", 0), ("module", 1), ("module", 2), ("graph", 3), ("graph", 4)]
)
def test_it_is_exact(maps: hc.GatedModel, form: str, seed: int) -> None:
    gated = at_random(copy.deepcopy(maps), seed)
    small = hc.compact(gated, form=form)  # type: ignore[arg-type]
    assert gap(gated, small, Maps.example(5)) < 1e-5
    assert not any(hasattr(module, "ungated") for module in small.modules())


@pytest.mark.parametrize("readout", ["paper", "median", "mean", "binary"])
def test_any_readout(readout: str) -> None:
    gated = at_random(hc.attach_gates(Joined(), torch.randn(3, 4), readout=readout))
    assert gap(gated, hc.compact(gated), torch.randn(5, 4)) < 1e-5


@pytest.fixture(scope="module")
def lenet() -> hc.GatedModel:
    torch.manual_seed(0)
    model = LeNet5()
    for bias in (model.conv1.bias, model.conv2.bias, model.fc1.bias):
        nn.init.normal_(bias)
    return hc.attach_gates(model, torch.randn(2, 1, 28, 28), sites=PAPER)


@pytest.mark.parametrize("form", ["module", "graph"])
def test_the_placement_of_the_paper(lenet: hc.GatedModel, form: str) -> None:
    gated = at_random(copy.deepcopy(lenet), seed=3)
    small = hc.compact(gated, form=form)  # type: ignore[arg-type]
    z = gated.gate_values()
    inputs = (z["fc1:in"].view(50, 16) != 0) & (z["conv2:out"] != 0)[:, None]
    maps = inputs.any(1)
    plan = hc.CompactionPlan.of(small)
    assert plan.groups["conv2"].kept == tuple(maps.nonzero().flatten().tolist())
    assert plan.groups["conv1"].kept == tuple(z["conv1:out"].nonzero().flatten().tolist())
    assert plan.groups["fc1"].kept == tuple(z["fc2:in"].nonzero().flatten().tolist())
    assert small.fc1.kept_inputs.tolist() == inputs[maps].flatten().nonzero().flatten().tolist()
    assert small.fc1.weight.shape == (len(plan.groups["fc1"].kept), int(inputs.sum()))
    assert gap(gated, small, torch.randn(5, 1, 28, 28)) < 1e-5


def test_the_index_select_stands_before_the_layer(lenet: hc.GatedModel) -> None:
    small = hc.compact(at_random(copy.deepcopy(lenet), seed=3))
    assert type(small) is LeNet5
    assert isinstance(small.fc1, nn.Linear)
    seen: list[torch.Size] = []
    small.fc1.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    small(torch.randn(2, 1, 28, 28))
    assert seen[0][1] == 16 * small.conv2.out_channels > small.fc1.in_features


def test_sites_among_units_that_were_found() -> None:
    gated = hc.attach_gates(LeNet5(), torch.randn(2, 1, 28, 28), sites=["auto", "fc1:in"])
    assert [group.name for group in gated.groups] == ["conv1", "fc1", "fc1:in"]
    small = hc.compact(at_random(gated))
    assert gap(gated, small, torch.randn(5, 1, 28, 28)) < 1e-5
    assert hc.CompactionPlan.of(small).selections.keys() == {"fc1"}


def test_the_form_is_said_and_can_be_demanded() -> None:
    gated = at_random(hc.attach_gates(Joined(), torch.randn(3, 4)))
    assert type(hc.compact(gated)) is Joined
    assert type(hc.compact(gated, form="module")) is Joined
    assert type(hc.compact(gated, form="graph")) is CompactedGraph
    for form in ("module", "graph"):
        assert hc.CompactionPlan.of(hc.compact(gated, form=form)).form == form  # type: ignore[arg-type]


def test_the_graph_is_the_second_choice() -> None:
    for model, x in ((Sized(), Sized.example()), (Averaged(), torch.randn(3, 4))):
        gated = at_random(hc.attach_gates(model, x), seed=2)
        small = hc.compact(gated)
        assert hc.CompactionPlan.of(small).form == "graph"
        assert gap(gated, small, x) < 1e-5


def test_a_difference_is_an_error_that_names_the_layer() -> None:
    gated = with_shut(hc.attach_gates(Averaged(), torch.randn(3, 4)), {"a": [0, 5]})
    with pytest.raises(CompactionError) as error:
        hc.compact(gated, form="module")
    text = str(error.value)
    assert text.startswith("Averaged could not be made small. as module: its outputs differ by ")
    assert "times what is tolerated (b differs)" in text
    assert text.endswith("Ask for form='auto' to allow the graph form")


def test_a_forward_that_fails_is_quoted() -> None:
    gated = with_shut(hc.attach_gates(Sized(), Sized.example()), {"conv": [0, 3]})
    with pytest.raises(CompactionError, match=r"as module: RuntimeError: .*shape"):
        hc.compact(gated, form="module")


class Noisy(nn.Module):
    """Drops units in evaluation too: no two calls give the same, and no unit can go."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x), 0.5, training=True))


def test_noise_in_evaluation_is_no_difference() -> None:
    gated = hc.attach_gates(Noisy(), torch.randn(3, 4), sites=["b:in"]).eval()
    state = torch.get_rng_state()
    small = hc.compact(with_shut(gated, {"b:in": [0, 5]})).eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert small.b.in_features == 4
    x = torch.randn(5, 4)
    torch.manual_seed(1)
    expected = gated(x)
    torch.manual_seed(1)
    torch.testing.assert_close(small(x), expected)


class Cast(nn.Module):
    """Computes in bfloat16, of which neither weights nor outputs tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(self.a(x).relu()).float()


def test_autocast_inside_is_compared_by_its_own_precision() -> None:
    gated = at_random(hc.attach_gates(Cast(), torch.randn(3, 16)))
    small = hc.compact(gated)
    assert small.b.weight.dtype == torch.float32
    assert gap(gated, small, torch.randn(5, 16)) < 2e-2


def test_small_models_compile_and_export() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4), sites=["0:in", "2:in"])
    x = torch.randn(3, 4)
    for form in ("module", "graph"):
        small = hc.compact(with_shut(gated, {"0:in": [1]}), form=form).eval()  # type: ignore[arg-type]
        compiled = torch.compile(small, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), small(x))
        torch.testing.assert_close(torch.export.export(small, (x,)).module()(x), small(x))


def test_a_small_model_can_be_gated_and_compacted_again() -> None:
    gated = hc.attach_gates(dense(), torch.randn(3, 4))
    small = hc.compact(with_shut(gated, {"0": [0], "2": [4]}))
    again = hc.attach_gates(small, torch.randn(3, 4))
    smaller = hc.compact(with_shut(again, {"0": [1, 2]}))
    assert [smaller[0].out_features, smaller[2].out_features] == [3, 4]
    assert gap(again, smaller, torch.randn(5, 4)) < 1e-5


WRONG = {
    "model": (lambda: hc.compact(dense()), "compact takes what attach_gates returned, not a Seq"),
    "form": (lambda: hc.compact(made(), form="onnx"), "form='onnx' is not known; use 'auto', 'mod"),
    "min_units": (
        lambda: hc.compact(made(), min_units=-1),
        "min_units=-1 must be a whole number, at least 0",
    ),
}


def made() -> hc.GatedModel:
    return hc.attach_gates(dense(), torch.randn(3, 4))


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG.keys())
def test_arguments(call: object, words: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()  # type: ignore[operator]
    assert words in str(error.value)


class Chooses(nn.Module):
    """Decides by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.a(-x)


def test_a_model_that_cannot_be_traced_is_refused_with_words() -> None:
    gated = hc.attach_gates(Chooses(), torch.randn(3, 4), sites=["a:in"])
    with pytest.raises(TraceError, match="Chooses cannot be traced"):
        hc.compact(gated)


def test_compact_after_training() -> None:
    """The whole way: gates learn, and what they leave is what the small model is."""
    x = torch.randn(64, 4)
    y = x[:, 0] * 2 - x[:, 1]
    gated = hc.attach_gates(dense(), x, droprate=0.5)
    penalty = hc.L0Penalty(gated, lam=1e-3)
    optimizer = torch.optim.Adam(hc.parameter_groups(gated, lr=1e-2, gate_lr=0.8))
    for _ in range(25):
        loss = (gated(x)[:, 0] - y).square().mean() + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small = hc.compact(gated)
    left = [len(kept.kept) for kept in hc.CompactionPlan.of(small).groups.values()]
    assert 2 < sum(left) < 11
    assert [small[0].out_features, small[2].out_features] == left
    assert gap(gated, small, torch.randn(7, 4)) < 1e-5


def test_several_inputs_by_keyword() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, *, y: Tensor, sign: int = 1) -> dict[str, Tensor]:
            return {"out": self.c((self.a(x) + self.b(y)).relu()) * sign}

    gated = hc.attach_gates(Pair(), torch.randn(3, 4), {"y": torch.randn(3, 3), "sign": -1})
    for form in ("module", "graph"):
        small = hc.compact(at_random(gated), form=form)  # type: ignore[arg-type]
        x, y = torch.randn(5, 4), torch.randn(5, 3)
        out = small.eval()(x, y=y, sign=-1)["out"]
        torch.testing.assert_close(out, gated.eval()(x, y=y, sign=-1)["out"])


def test_units_of_tied_weights_go_everywhere() -> None:
    gated = hc.attach_gates(TiedWords(), torch.randint(9, (3, 4)))
    assert [group.name for group in gated.groups] == ["words"]
    small = hc.compact(with_shut(gated, {"words": [0, 2]}))
    assert (small.mix.in_features, small.mix.out_features) == (4, 4)


class Decoy(nn.Module):
    """Two attributes of the same value, of which one is a size: zeros cannot tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = self.temperature = 16
        self.conv = nn.Conv2d(3, 16, 1, bias=False)
        self.head = nn.Linear(16, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3)).view(-1, self.channels)
        return self.head(x) * self.temperature


def test_example_inputs_of_zeros_do_not_hide_a_difference() -> None:
    torch.manual_seed(0)
    gated = hc.attach_gates(Decoy(), torch.zeros(2, 3, 4, 4), droprate=0.5)
    with torch.no_grad():
        gated.gates.log_alpha[:10] = -9.0
    small = hc.compact(gated)
    x = torch.randn(4, 3, 4, 4)
    torch.testing.assert_close(small(x), gated.eval()(x))
    assert (small.channels, small.temperature) == (6, 16)


def test_a_model_for_one_batch_size_is_compared_at_that_one() -> None:
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    gated = hc.attach_gates(model, torch.randn(6))
    with torch.no_grad():
        gated.gates.log_alpha[:10] = -9.0
    assert hc.compact(gated)[0].out_features == 10


def test_a_plan_is_not_applied_to_a_gated_model() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(2, 4))
    plan = hc.CompactionPlan.of(hc.compact(gated))
    with pytest.raises(hc.HardConcreteError, match=r"this one has gates: hc.remove_gates"):
        plan.apply(gated.model)


def test_other_classes_of_the_same_shapes_are_another_architecture() -> None:
    gated = hc.attach_gates(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(2, 4)
    )
    plan = hc.CompactionPlan.of(hc.compact(gated))
    with pytest.raises(hc.HardConcreteError, match="modules here are of other classes"):
        plan.apply(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))


def test_gates_that_are_no_numbers_are_refused() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(2, 4))
    gated.gates.log_alpha.data[3] = float("nan")
    for budget in (None, hc.Budget(gated, macs=0.5, by="gates")):
        with pytest.raises(CompactionError, match="log_alpha is not a number in 0: go back"):
            hc.compact(gated, budget=budget)


def test_a_network_without_an_open_gate_is_said_to_have_collapsed() -> None:
    gated = hc.attach_gates(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(2, 4))
    nn.init.constant_(gated.gates.log_alpha, -9.0)
    with pytest.warns(hc.HardConcreteWarning, match="no gate is open: the network has collapsed"):
        hc.compact(gated)
